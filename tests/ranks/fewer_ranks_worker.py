"""Cases of test_fewer_ranks.py: trainings that go on with other ranks, and the same samples in each update.

Each update has 16 of an epoch's 40 samples, so that windows span epochs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.communication import get_rank
from mindspore.dataset import GeneratorDataset, NumpySlicesDataset
from mindspore.train import Callback, CheckpointConfig, ModelCheckpoint

from gaccum_ms import GradAccumulationCell, resume
from tests.support.modes import eagerly
from tests.support.reference import Regression, as_numpy, batches
from tests.support.two_ranks import Results

SAMPLES, EPOCHS, UPDATES = 40, 2, 5
FORMS = {  # samples in a rank's batch, and batches in its window
    "larger batches": lambda ranks: (4 // ranks, 4),
    "more batches": lambda ranks: (2, 8 // ranks),
}
SOURCES: Mapping[str, Any] = {
    "slices": lambda **shards: NumpySlicesDataset(samples(), **shards),
    "generator": lambda **shards: GeneratorDataset(list(zip(*samples(), strict=True)), ["x", "y"], **shards),
}
SEEN = {"in mid-window": 24, "between windows": 32, "in the second epoch": 52}  # samples of all ranks


def samples() -> tuple[np.ndarray, np.ndarray]:
    return batches(SAMPLES, 1, seed=9)[0]


def make_data_set(form: str, source: str, rank: int, ranks: int) -> Any:
    ms.dataset.config.set_seed(7)
    return SOURCES[source](shuffle=True, num_shards=ranks, shard_id=rank).batch(FORMS[form](ranks)[0])


def make_model(form: str, ranks: int) -> ms.Model:
    network = Regression()
    cell = GradAccumulationCell(network, micro_batch_size=1, accumulation_steps=FORMS[form](ranks)[1])
    return ms.Model(cell, optimizer=nn.Momentum(network.trainable_params(), 0.05, 0.9))


def file_of(out: Path, form: str, source: str, seen: int, rank: int, ranks: int) -> str:
    """The checkpoint of a rank when all ranks have seen so many samples."""
    size = FORMS[form](ranks)[0] * ranks
    epoch, batch = divmod(seen // size - 1, SAMPLES // size)
    return str(out / f"{form} {source} {rank} of {ranks}" / f"net-{epoch + 1}_{batch + 1}.ckpt")


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
    weights = np.concatenate([as_numpy(weight).ravel() for weight in step.weights])
    return {"weights": weights, "updates": as_numpy(step.update_count), "seen": np.array(seen.rows)}


@eagerly()
def train_and_save(out: Path, form: str, source: str, rank: int, ranks: int) -> Results:
    """Train to the end, with a checkpoint after each batch."""
    folder = Path(file_of(out, form, source, 16, rank, ranks)).parent
    saver = ModelCheckpoint("net", str(folder), CheckpointConfig(1, keep_checkpoint_max=100))
    return trained(make_model(form, ranks), make_data_set(form, source, rank, ranks), 0, saver)


@eagerly()
def go_on(out: Path, form: str, source: str, seen: int, saved_ranks: int, rank: int, ranks: int) -> Results:
    """Resume on `ranks` from the checkpoints of `saved_ranks` , and train to the end."""
    files = [file_of(out, form, source, seen, saved, saved_ranks) for saved in range(saved_ranks)]
    model, data_set = make_model(form, ranks), make_data_set(form, source, rank, ranks)
    return trained(model, data_set, resume(model, files, data_set))


def named(name: str, results: Results) -> Results:
    return {f"{name}/{key}": value for key, value in results.items()}


def saving(form: str, source: str) -> Any:
    name = f"two ranks, {form}, {source}"
    return {name: lambda out: named(name, train_and_save(out, form, source, get_rank(), 2))}


def going_on(form: str, source: str, place: str) -> Any:
    name = f"from one, {form}, {source}, {place}"
    return {name: lambda out: named(name, go_on(out, form, source, SEEN[place], 1, get_rank(), 2))}


CASES: dict[str, Any] = {}
for _form in FORMS:
    for _source in SOURCES:
        CASES |= saving(_form, _source)
        for _place in SEEN:
            CASES |= going_on(_form, _source, _place)
