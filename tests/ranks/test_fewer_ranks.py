"""Fewer ranks, and more, that go on with the same samples in each update: real processes, compared with a training that
nothing interrupted.

Each update has 16 of an epoch's 40 samples, so that windows span epochs, with more batches on fewer ranks. Samples
count by a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.communication import get_rank
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, CheckpointConfig, ModelCheckpoint

from gaccum_ms import CountMask, GradAccumulationCell, WeightAverage, resume
from tests.ranks.cases import named
from tests.support.modes import eagerly
from tests.support.reference import Regression, as_numpy, batches, relative_error, vector
from tests.support.two_ranks import Results, case, results_of

pytestmark = pytest.mark.distributed
SAMPLES, EPOCHS, UPDATES = 40, 2, 5
SEEN = {"in mid-window": 24, "between windows": 32, "in the second epoch": 52}  # samples of all ranks
BATCH = 2


def make_data_set(rank: int, ranks: int) -> Any:
    x, y = batches(SAMPLES, 1, seed=9)[0]
    rows = list(zip(x, y, np.random.default_rng(3).choice([0.25, 1.0, 4.0], SAMPLES).astype(np.float32), strict=True))
    ms.dataset.config.set_seed(7)
    data_set = GeneratorDataset(rows, ["x", "y", "mask"], shuffle=True, num_shards=ranks, shard_id=rank)
    return data_set.batch(BATCH)


def make_model(ranks: int) -> ms.Model:
    network = Regression()
    options = {"count": CountMask(), "transforms": (WeightAverage(0.5),)}
    cell = GradAccumulationCell(network, micro_batch_size=1, accumulation_steps=8 // ranks, **options)
    return ms.Model(cell, optimizer=nn.Momentum(network.trainable_params(), 0.05, 0.9))


def file_of(out: Path, seen: int, rank: int, ranks: int) -> str:
    """The checkpoint of a rank when all ranks have seen so many samples."""
    epoch, batch = divmod(seen // (BATCH * ranks) - 1, SAMPLES // (BATCH * ranks))
    return str(out / f"{rank} of {ranks}" / f"net-{epoch + 1}_{batch + 1}.ckpt")


class Seen(Callback):
    """The samples of each batch, with the update that follows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[float]] = []

    def on_train_step_begin(self, run_context):
        parameters = run_context.original_args()
        update = int(parameters.train_network.update_count.asnumpy()) + 1
        self.rows += [[update, value] for value in parameters.train_dataset_element[0].asnumpy()[:, 0]]


def trained(model: ms.Model, data_set: Any, finished: int = 0, *callbacks: Callback) -> Results:
    seen = Seen()
    model.train(EPOCHS, data_set, callbacks=[seen, *callbacks], initial_epoch=finished, dataset_sink_mode=False)
    step = model.train_network
    with step.averaged_weights():
        averages = vector(step.weights)
    values = {"weights": vector(step.weights), "averages": averages, "updates": as_numpy(step.update_count)}
    return values | {"seen": np.array(seen.rows)}


@eagerly()
def train_and_save(out: Path, rank: int, ranks: int) -> Results:
    """Train to the end, with a checkpoint after each batch."""
    saver = ModelCheckpoint("net", str(out / f"{rank} of {ranks}"), CheckpointConfig(1, keep_checkpoint_max=100))
    return trained(make_model(ranks), make_data_set(rank, ranks), 0, saver)


@eagerly()
def go_on(out: Path, place: str, saved_ranks: int, rank: int, ranks: int) -> Results:
    """Resume on `ranks` from the checkpoints of `saved_ranks` , and train to the end."""
    files = [file_of(out, SEEN[place], saved, saved_ranks) for saved in range(saved_ranks)]
    model, data_set = make_model(ranks), make_data_set(rank, ranks)
    return trained(model, data_set, resume(model, files, data_set))


CASES: dict[str, Callable[[Path], Results]] = {
    "two ranks": lambda out: named("two ranks", train_and_save(out, get_rank(), 2)),
    **{place: lambda out, place=place: named(place, go_on(out, place, 1, get_rank(), 2)) for place in SEEN},
}


ranks = results_of("test_fewer_ranks")


def samples_of_updates(*ranks: Results) -> list[list[float]]:
    rows = np.concatenate([results["seen"] for results in ranks])
    return [sorted(rows[rows[:, 0] == update, 1]) for update in np.unique(rows[:, 0])]


def assert_same_updates(got: list[Results], unbroken: list[Results], seen: int) -> None:
    """The later updates have the same samples, to the last one; weights and averages are equal to rounding."""
    for results in got:
        assert results["updates"] == unbroken[0]["updates"] == UPDATES
        for name in ("weights", "averages"):
            assert relative_error(results[name], unbroken[0][name]) < 1e-5
    expected = samples_of_updates(*unbroken)[seen // 16 :]
    here = samples_of_updates(*got)
    assert len(here) == len(expected)
    assert here[1:] == expected[1:]
    assert set(here[0]) <= set(expected[0])  # the update whose window was open
    assert len(here[0]) == 16 - seen % 16


@pytest.mark.parametrize("place", ["in mid-window", "in the second epoch"])
def test_one_process_goes_on_from_two_ranks_as_if_not_interrupted(out, ranks, place):
    unbroken = [case(results, "two ranks") for results in ranks]
    assert_same_updates([go_on(out, place, 2, 0, 1)], unbroken, SEEN[place])


def test_two_ranks_go_on_from_one_process_as_if_not_interrupted(out, ranks):
    unbroken = train_and_save(out, 0, 1)
    for place in ("in mid-window", "between windows"):
        assert_same_updates([case(results, place) for results in ranks], [unbroken], SEEN[place])
