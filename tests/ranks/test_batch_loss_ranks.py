"""WithBatchLossCell on two real processes: the loss of all ranks' samples."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.communication import get_rank

from gaccum_ms import GradAccumulationCell, TrainOneStepWithGradAccumulationCell, WithBatchLossCell
from tests.ranks.cases import error_of, named, set_up
from tests.support import contrastive
from tests.support.contrastive import accumulated, batches, make_parts, whole
from tests.support.modes import eagerly
from tests.support.state import assert_close, everything
from tests.support.two_ranks import Results, case, results_of

pytestmark = pytest.mark.distributed
PER_RANK, UPDATES = 7, 3  # 7 samples are ragged in 3 micro-batches


def shares(kind: str, number: int) -> list[tuple[np.ndarray, ...]]:
    own = slice(get_rank() * PER_RANK, (get_rank() + 1) * PER_RANK)
    return [tuple(value[own] for value in batch) for batch in batches(kind, 2 * PER_RANK, number)]


# Without gradients_mean and with it.
TRAINED = {"gathered": ("towers", "graph", False), "gathered, labels": ("labels", "pynative", True)}


def trained(name: str) -> Callable[[Path], Results]:
    def case(out: Path) -> Results:
        kind, *settings = TRAINED[name]
        set_up(*settings)
        run = contrastive.train(accumulated(gather_ranks=True, micro_size=3), kind, shares(kind, UPDATES))
        return named(name, {"losses": run.losses, **run.state})

    return case


@functools.cache
@eagerly()
def joined(kind: str) -> dict[str, np.ndarray]:
    """The results of one process, with MindSpore's own step on the joined batches of both ranks."""
    run = contrastive.train(whole, kind, batches(kind, 2 * PER_RANK, UPDATES))
    return {"losses": run.losses, **run.state}


@pytest.mark.parametrize("name", TRAINED)
def test_gathered_equals_one_process_on_the_joined_batch(ranks, name):
    """The loss, the weights and the loss's temperature are equal."""
    for results in ranks:
        assert_close(case(results, name), joined(TRAINED[name][0]), 2e-5)


def make_gathering() -> tuple[GradAccumulationCell, nn.Optimizer]:
    network = WithBatchLossCell(*make_parts("towers"), gather_ranks=True)
    return GradAccumulationCell(network, 3), nn.SGD(network.trainable_params(), 0.2)


def left_out(out: Path) -> Results:
    """One step meets batches of unequal size, an infinity on one rank, and then a sound batch."""
    set_up()
    rank, (cell, optimizer) = get_rank(), make_gathering()
    step = TrainOneStepWithGradAccumulationCell(cell, optimizer, Tensor(256.0, ms.float32)).set_train()
    ((x, text),) = shares("towers", 1)
    before = everything(cell.network)

    def same() -> bool:
        return all((value == before[name]).all() for name, value in everything(cell.network).items())

    results = {"message": error_of(lambda: step(Tensor(x[: 5 + rank]), Tensor(text[: 5 + rank])))}
    results["unequal left all"] = same()
    bad = x.copy()
    if rank == 1:
        bad[2, 0] = np.inf
    results["overflow"] = step(Tensor(bad), Tensor(text))[1].asnumpy()
    results["overflow left all"] = same()
    loss, overflow, _ = step(Tensor(x), Tensor(text))
    return named("left out", results | {"loss": loss.asnumpy(), "sound": not bool(overflow)})


def test_unequal_batches_are_refused_and_an_overflow_skips_on_both_ranks_and_training_goes_on(ranks):
    for results in ranks:
        outcome = case(results, "left out")
        assert "batches of the same size" in str(outcome["message"])
        assert "got [5, 6] samples on the ranks" in str(outcome["message"])
        assert all(outcome[name] for name in ("unequal left all", "overflow", "overflow left all", "sound"))
        assert float(outcome["loss"]) == pytest.approx(joined("towers")["losses"][0], rel=1e-5)


def made_too_early(out: Path) -> Results:
    ms.set_auto_parallel_context(parallel_mode="stand_alone")
    cell, optimizer = make_gathering()
    ms.set_auto_parallel_context(parallel_mode="data_parallel")
    return {"early": np.array(error_of(lambda: TrainOneStepWithGradAccumulationCell(cell, optimizer)))}


def test_a_network_made_before_the_parallel_mode_was_set_is_refused(ranks):
    for results in ranks:
        assert "got 1 rank(s) then and 2 now" in str(results["early"])


CASES = {**{name: trained(name) for name in TRAINED}, "left out": left_out, "early": made_too_early}
ranks = results_of("test_batch_loss_ranks")
