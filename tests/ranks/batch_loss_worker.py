"""The cases of the tests of batch losses on ranks (support/ranks.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import get_rank

from gaccum_ms import GradAccumulationCell, TrainOneStepWithGradAccumulationCell, WithBatchLossCell
from tests.ranks.cases import error_of, named, set_up
from tests.support import contrastive
from tests.support.contrastive import accumulated, batches, make_parts
from tests.support.state import everything
from tests.support.two_ranks import Results

PER_RANK, UPDATES = 7, 3  # 7 samples are ragged in 3 micro-batches


def shares(kind: str, number: int) -> list[tuple[np.ndarray, ...]]:
    own = slice(get_rank() * PER_RANK, (get_rank() + 1) * PER_RANK)
    return [tuple(value[own] for value in batch) for batch in batches(kind, 2 * PER_RANK, number)]


def make_gathering() -> tuple[GradAccumulationCell, nn.Optimizer]:
    network = WithBatchLossCell(*make_parts("towers"), gather_ranks=True)
    return GradAccumulationCell(network, 3), nn.SGD(network.trainable_params(), 0.2)


def trained(name: str, kind: str, mode: str, mean: bool, make_step: Callable) -> Callable[[Path], Results]:
    def case(out: Path) -> Results:
        set_up(mode, mean)
        run = contrastive.train(make_step, kind, shares(kind, UPDATES))
        return named(name, {"losses": run.losses, **run.state})

    return case


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


def made_too_early(out: Path) -> Results:
    ms.set_auto_parallel_context(parallel_mode="stand_alone")
    cell, optimizer = make_gathering()
    ms.set_auto_parallel_context(parallel_mode="data_parallel")
    return {"early": np.array(error_of(lambda: TrainOneStepWithGradAccumulationCell(cell, optimizer)))}


TRAINED: dict[str, tuple[str, str, bool, Callable]] = {
    "gathered": ("towers", "graph", False, accumulated(gather_ranks=True, micro_size=3)),
    "gathered, labels": ("labels", "pynative", True, accumulated(gather_ranks=True, micro_size=3)),
}
CASES: dict[str, Callable[[Path], Results]] = {
    **{name: trained(name, *training) for name, training in TRAINED.items()},
    "left out": left_out,
    "early": made_too_early,
}
