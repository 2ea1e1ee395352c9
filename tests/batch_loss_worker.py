"""One rank of the tests of batch losses: trains every way asked for and writes what it got.

Run by ``python -m gaccum_ms.launch -n 2 batch_loss_worker.py OUT``: one start of the ranks serves all cases.
"""

from __future__ import annotations

import sys
from pathlib import Path

import contrastive
import mindspore as ms
import numpy as np
from contrastive import accumulated, batches, make_parts, whole
from mindspore import Tensor, nn
from mindspore.communication import get_group_size, get_rank, init
from reference import OPTIMIZERS, as_numpy, step_with
from two_ranks import leave

from gaccum_ms import GradAccumulationCell, TrainOneStepWithGradAccumulationCell, WithBatchLossCell, audit
from gaccum_ms.accumulation.grad_cache import BatchLossWindow

PER_RANK, UPDATES = 7, 4  # 7 samples are ragged in 3 micro-batches


class RanksCountTwice(BatchLossWindow):
    """Negative control: every rank's loss is one of its own."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.share_of_ranks = 1.0


# Of cells with gather_ranks: each with gradients_mean and without.
GATHERED = {
    "graph-3": {"micro_size": 3},
    "graph-1": {"micro_size": 1},
    "pynative-3": {"micro_size": 3},
    "jit-3": {"micro_size": 3, "jit": True},
    "graph-scaled": {"micro_size": 3, "scale_sense": Tensor(256.0, ms.float32)},
    "graph-clipped": {"micro_size": 3, "max_grad_norm": 0.05},
    "graph-sharded": {"micro_size": 3, "shard_accumulators": True},
    "graph-broken": {"micro_size": 3, "step_class": step_with(RanksCountTwice)},
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


def unequal_batches(rank: int) -> dict[str, np.ndarray]:
    network, cell, optimizer = make_gathering()
    step = TrainOneStepWithGradAccumulationCell(cell, optimizer).set_train()
    x, text = batches("towers", 2 * PER_RANK, 1)[0]
    before = {one.name: as_numpy(one) for one in network.get_parameters()}
    try:
        step(Tensor(x[: 5 + rank]), Tensor(text[: 5 + rank]))
        message = ""
    except ValueError as error:
        message = str(error)
    same = all((as_numpy(one) == before[one.name]).all() for one in network.get_parameters())
    loss = float(step(*map(Tensor, share((x, text), rank))))
    return {"message": np.array(message), "same": np.array(same), "loss": np.array(loss)}


def overflow_of_one(rank: int) -> dict[str, np.ndarray]:
    network, cell, optimizer = make_gathering()
    step = TrainOneStepWithGradAccumulationCell(cell, optimizer, Tensor(256.0, ms.float32)).set_train()
    x, text = share(batches("towers", 2 * PER_RANK, 1)[0], rank)
    if rank == 1:
        x[2, 0] = np.inf
    before = {one.name: as_numpy(one) for one in network.get_parameters()}
    _, overflow, _ = step(Tensor(x), Tensor(text))
    same = all((as_numpy(one) == before[one.name]).all() for one in network.get_parameters())
    return {"overflow": np.array(bool(overflow)), "same": np.array(same)}


def made_too_early() -> str:
    ms.set_auto_parallel_context(parallel_mode="stand_alone")
    _, cell, optimizer = make_gathering()
    ms.set_auto_parallel_context(parallel_mode="data_parallel")
    try:
        TrainOneStepWithGradAccumulationCell(cell, optimizer)
    except RuntimeError as error:
        return str(error)
    return ""


def main(out: Path) -> None:
    ms.set_device("CPU")
    init()
    rank, size = get_rank(), get_group_size()
    results: dict[str, np.ndarray] = {}

    def keep(case: str, values) -> None:
        for name, value in values.items():
            results[f"{case}/{name}"] = value

    def keep_run(case: str, run) -> None:
        keep(case, {"losses": run.losses, **run.state})

    for mean in (True, False):
        for kind in ("towers", "labels"):
            shares = [share(batch, rank) for batch in batches(kind, PER_RANK * size, UPDATES)]
            for case, options in GATHERED.items():
                if kind == "towers" or case in ("graph-3", "pynative-3"):
                    set_way(case, mean)
                    make_step = accumulated(gather_ranks=True, **options)
                    keep_run(f"gathered-{kind}-{case}-mean{mean:d}", contrastive.train(make_step, kind, shares))
        for mode in ("graph", "pynative"):
            set_way(mode, mean)
            shares = [share(batch, rank) for batch in batches("towers", PER_RANK * size, UPDATES)]
            for case, make_step in {
                "whole": whole,
                "3": accumulated(micro_size=3),
                "1": accumulated(micro_size=1),
                "sharded": accumulated(micro_size=3, shard_accumulators=True),
            }.items():
                run = contrastive.train(make_step, "towers", shares, OPTIMIZERS["momentum"])
                keep_run(f"own-{case}-{mode}-mean{mean:d}", run)
        set_way("graph", mean)
        _, cell, optimizer = make_gathering("labels")
        report = audit(cell, optimizer, *map(Tensor, share(batches("labels", PER_RANK * size, 1)[0], rank)))
        keep(f"audit-mean{mean:d}", {"ok": np.array(report.ok), "text": np.array(str(report))})

    for mode in ("graph", "pynative"):
        set_way(mode, True)
        keep(f"unequal-{mode}", unequal_batches(rank))
        keep(f"overflow-{mode}", overflow_of_one(rank))
    results["early"] = np.array(made_too_early())

    set_way("graph", False)
    network, cell, optimizer = make_gathering()
    x, text = share(batches("towers", PER_RANK * size, 1)[0], rank)
    data_set = ms.dataset.NumpySlicesDataset((x, text), shuffle=False).batch(PER_RANK)
    ms.Model(cell, optimizer=optimizer).train(3, data_set, dataset_sink_mode=False)
    keep("model", {one.name: as_numpy(one) for one in network.get_parameters()})
    leave(out, rank, results)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
