"""The cases of the tests of batch losses on ranks (support/ranks.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import get_group_size, get_rank

from gaccum_ms import GradAccumulationCell, TrainOneStepWithGradAccumulationCell, WithBatchLossCell, audit
from tests.support import contrastive
from tests.support.contrastive import accumulated, batches, make_parts, whole
from tests.support.modes import MODES
from tests.support.reference import OPTIMIZERS, as_numpy
from tests.support.two_ranks import Results

PER_RANK, UPDATES = 7, 3  # 7 samples are ragged in 3 micro-batches


def set_way(way: str, mean: bool) -> None:
    ms.set_context(mode=MODES[way])
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=mean)


def share(batch, rank: int):
    return tuple(value[rank * PER_RANK : (rank + 1) * PER_RANK] for value in batch)


def make_gathering(kind: str = "towers", micro_size: int = 3):
    network = WithBatchLossCell(*make_parts(kind), gather_ranks=True)
    return network, GradAccumulationCell(network, micro_size), nn.SGD(network.trainable_params(), 0.2)


def left_out() -> dict[str, np.ndarray]:
    """One step meets batches of unequal size, an infinity on one rank, and then a sound batch."""
    rank = get_rank()
    network, cell, optimizer = make_gathering()
    step = TrainOneStepWithGradAccumulationCell(cell, optimizer, Tensor(256.0, ms.float32)).set_train()
    x, text = share(batches("towers", 2 * PER_RANK, 1)[0], rank)
    before = {one.name: as_numpy(one) for one in network.get_parameters()}

    def same() -> np.ndarray:
        return np.array(all((as_numpy(one) == before[one.name]).all() for one in network.get_parameters()))

    try:
        step(Tensor(x[: 5 + rank]), Tensor(text[: 5 + rank]))
        message = ""
    except ValueError as error:
        message = str(error)
    results = {"message": np.array(message), "unequal left all": same()}
    bad = x.copy()
    if rank == 1:
        bad[2, 0] = np.inf
    results["overflow"] = step(Tensor(bad), Tensor(text))[1].asnumpy()
    results["overflow left all"] = same()
    loss, overflow, _ = step(Tensor(x), Tensor(text))
    return results | {"loss": loss.asnumpy(), "sound": np.array(not bool(overflow))}


def made_too_early() -> str:
    ms.set_auto_parallel_context(parallel_mode="stand_alone")
    _, cell, optimizer = make_gathering()
    ms.set_auto_parallel_context(parallel_mode="data_parallel")
    try:
        TrainOneStepWithGradAccumulationCell(cell, optimizer)
    except RuntimeError as error:
        return str(error)
    return ""


# -- all cases ---------------------------------------------------------------------------------------------------------


def audited() -> dict[str, np.ndarray]:
    _, cell, optimizer = make_gathering()
    batch = batches("towers", PER_RANK * get_group_size(), 1)[0]
    report = audit(cell, optimizer, *map(Tensor, share(batch, get_rank())))
    return {"ok": np.array(report.ok), "text": np.array(str(report))}


def trained(kind: str, make_step: Callable, optimizer: Callable | None = None) -> dict[str, np.ndarray]:
    shares = [share(batch, get_rank()) for batch in batches(kind, PER_RANK * get_group_size(), UPDATES)]
    run = contrastive.train(make_step, kind, shares, optimizer)
    return {"losses": run.losses, **run.state}


def as_case(name: str, way: str, mean: bool, task: Callable, *arguments) -> Callable[[Path], Results]:
    """`task` in a way, with or without `gradients_mean` . The names of its results begin with `name` ."""

    def case(out: Path) -> Results:
        set_way(way, mean)
        return {f"{name}/{key}": value for key, value in task(*arguments).items()}

    return case


def gathered(**options) -> Callable:
    return accumulated(gather_ranks=True, micro_size=3, **options)


MOMENTUM = OPTIMIZERS["momentum"]
TASKS: dict[str, tuple] = {  # way, gradients_mean, task and its arguments
    "gathered": ("graph", False, trained, "towers", gathered()),
    "gathered, clipped": ("pynative", True, trained, "towers", gathered(max_grad_norm=0.05)),
    "gathered, labels": ("pynative", False, trained, "labels", gathered()),
    "own, whole": ("pynative", False, trained, "towers", whole, MOMENTUM),
    "own": ("pynative", False, trained, "towers", accumulated(micro_size=3), MOMENTUM),
    "audit": ("pynative", True, audited),
    "left out": ("pynative", True, left_out),
}
CASES: dict[str, Callable[[Path], Results]] = {
    **{name: as_case(name, *task) for name, task in TASKS.items()},
    "early": lambda out: {"early": np.array(made_too_early())},
}
