"""The cases of the tests of batch losses on ranks (support/ranks.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import get_group_size, get_rank

from gaccum_ms import Accumulators, GradAccumulationCell, TrainOneStepWithGradAccumulationCell, WithBatchLossCell, audit
from gaccum_ms.accumulation.grad_cache import TwoPasses
from tests.support import contrastive
from tests.support.contrastive import accumulated, batches, make_parts, whole
from tests.support.reference import OPTIMIZERS, as_numpy, step_with
from tests.support.two_ranks import Results

PER_RANK, UPDATES = 7, 3  # 7 samples are ragged in 3 micro-batches


class RanksCountTwice(TwoPasses):
    """Negative control: the step counts each rank's loss as a separate loss."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.share_of_ranks = 1.0


# The options of cells with gather_ranks, each with and without gradients_mean.
GATHERED = {
    "graph-3": {"micro_size": 3},
    "graph-1": {"micro_size": 1},
    "pynative-3": {"micro_size": 3},
    "jit-3": {"micro_size": 3, "jit": True},
    "pynative-scaled": {"micro_size": 3, "scale_sense": Tensor(256.0, ms.float32)},
    "pynative-clipped": {"micro_size": 3, "max_grad_norm": 0.05},
    "graph-sharded": {"micro_size": 3, "accumulators": Accumulators(sharded=True)},
    "pynative-broken": {"micro_size": 3, "step_class": step_with(micro_step=RanksCountTwice)},
}


def set_way(case: str, mean: bool) -> None:
    graph = case.startswith("graph")
    ms.set_context(mode=ms.GRAPH_MODE if graph else ms.PYNATIVE_MODE)
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


def by_model() -> dict[str, np.ndarray]:
    network, cell, optimizer = make_gathering()
    x, text = share(batches("towers", PER_RANK * get_group_size(), 1)[0], get_rank())
    data_set = ms.dataset.NumpySlicesDataset((x, text), shuffle=False).batch(PER_RANK)
    ms.Model(cell, optimizer=optimizer).train(3, data_set, dataset_sink_mode=False)
    return {one.name: as_numpy(one) for one in network.get_parameters()}


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


OWN: dict[str, Callable] = {
    "whole": whole,
    "3": accumulated(micro_size=3),
    "1": accumulated(micro_size=1),
    "sharded": accumulated(micro_size=3, accumulators=Accumulators(sharded=True)),
}
TASKS: dict[str, tuple] = {  # way, gradients_mean, task and its arguments
    "model": ("graph", False, by_model),
}
for mean in (True, False):
    for kind in ("towers", "labels"):
        for way, options in GATHERED.items():
            if kind == "towers" or way in ("graph-3", "pynative-3"):
                make_step = accumulated(gather_ranks=True, **options)
                TASKS[f"gathered-{kind}-{way}-mean{mean:d}"] = way, mean, trained, kind, make_step
    for way in ("graph", "pynative"):
        for own, make_step in OWN.items():
            optimizer = OPTIMIZERS["momentum"]
            TASKS[f"own-{own}-{way}-mean{mean:d}"] = way, mean, trained, "towers", make_step, optimizer
        TASKS[f"audit-{way}-mean{mean:d}"] = way, mean, audited
for way in ("graph", "pynative"):
    TASKS[f"left out-{way}"] = way, True, left_out
CASES: dict[str, Callable[[Path], Results]] = {
    **{name: as_case(name, *task) for name, task in TASKS.items()},
    "early": lambda out: {"early": np.array(made_too_early())},
}
