"""One rank of the distributed tests: trains in data parallel mode every way asked for and writes what it got.

Run by ``python -m gaccum_ms.launch -n 2 distributed_worker.py OUT``: one start of the ranks serves all cases.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank, init
from mindspore.profiler import ProfilerActivity, profile, tensorboard_trace_handler
from reference import OPTIMIZERS, Line, accumulated, as_numpy, batches, make_network, step_with, train
from two_ranks import leave

from gaccum_ms import GradAccumulationCell, TrainOneStepWithGradAccumulationCell
from gaccum_ms.accumulation.window import SampleWindow
from gaccum_ms.distributed.all_reduce import FusedReducer

PER_RANK, UPDATES = 7, 4  # 7 samples are ragged in 2 and 3 micro-batches


class ReducesEachMicroBatch(SampleWindow):
    """Negative control for the number of collectives: right result, one reduction per micro-batch."""

    def add(self, gradients):
        return super().add(self.grad_reducer(gradients))

    def reduce(self, gradients, sums, scale, unit):
        return gradients, scale, sums / scale, True


class NotedAllReduce:
    """In the place of a reducer's AllReduce in an eagerly run step: notes the size of each buffer that leaves."""

    def __init__(self, reducer: FusedReducer) -> None:
        self.all_reduce = reducer.all_reduce
        self.sizes: list[int] = []
        del reducer.all_reduce
        reducer.all_reduce = self

    def __call__(self, buffer):
        self.sizes.append(buffer.size)
        return self.all_reduce(buffer)


def run(make_step, rank: int, size: int):
    """Train on this rank's share of each joint batch."""
    network = make_network("dense")
    shares = [(x[rank::size], y[rank::size]) for x, y in batches(PER_RANK * size, UPDATES)]
    return train(make_step, network, OPTIMIZERS["momentum"](network.trainable_params()), shares)


def reductions(window_class, micro_size: int, rank: int, size: int) -> int:
    noted = []

    def make_step(loss_cell, optimizer):
        step = step_with(window_class)(GradAccumulationCell(loss_cell, micro_size), optimizer)
        noted.append(NotedAllReduce(step.window.grad_reducer))
        return step

    run(make_step, rank, size)
    return len(noted[0].sizes)


def executed_all_reduces(window_class, micro_size: int, rank: int, size: int, out: Path) -> int:
    """AllReduce kernels that MindSpore's profiler saw run in UPDATES updates of the compiled step."""
    steps = []

    def make_step(loss_cell, optimizer):
        steps.append(step_with(window_class)(GradAccumulationCell(loss_cell, micro_size), optimizer))
        return steps[0]

    run(make_step, rank, size)  # compiles
    folder = out / f"profile-{window_class.__name__}-{micro_size}-{rank}"
    shares = [ms.Tensor(value[rank::size]) for value in batches(PER_RANK * size, 1)[0]]
    with profile(activities=[ProfilerActivity.CPU], on_trace_ready=tensorboard_trace_handler(str(folder))):
        for _ in range(UPDATES):
            steps[0](*shares).asnumpy()
    (table,) = folder.glob("**/cpu_op_type_info_*.csv")
    with table.open() as file:
        return sum(int(row["type_occurrences"]) for row in csv.DictReader(file) if row["op_type"] == "AllReduce")


class ClippedReducer(nn.Cell):
    """MindSpore's reducer, then its clipping: the reference for clipping after the reduction."""

    def __init__(self, reducer):
        super().__init__(auto_prefix=False)
        self.reducer = reducer

    def construct(self, gradients):
        return ops.clip_by_global_norm(self.reducer(gradients), 0.5)


def clipped_whole(loss_cell, optimizer):
    step = nn.TrainOneStepCell(loss_cell, optimizer)
    step.grad_reducer = ClippedReducer(step.grad_reducer)
    return step


def main(out: Path) -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    init()
    rank, size = get_rank(), get_group_size()
    results: dict[str, np.ndarray] = {}

    def keep(case: str, result) -> None:
        results[f"{case}/losses"] = result.losses
        for name, value in result.state.items():
            results[f"{case}/{name}"] = value

    for mean in (True, False):
        ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=mean)
        for mode in ("graph", "pynative"):
            ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
            keep(f"{mode}-mean{mean:d}-whole", run(nn.TrainOneStepCell, rank, size))
            for micro_size in (1, 3):
                keep(f"{mode}-mean{mean:d}-{micro_size}", run(accumulated(micro_size=micro_size), rank, size))
    ms.set_context(mode=ms.PYNATIVE_MODE)
    keep("jit-mean0-3", run(accumulated(micro_size=3, jit=True), rank, size))
    keep("clip-mean0-whole", run(clipped_whole, rank, size))
    keep("clip-mean0-3", run(accumulated(micro_size=3, max_grad_norm=0.5), rank, size))
    for window_class in (SampleWindow, ReducesEachMicroBatch):
        results[f"reductions/{window_class.__name__}"] = np.array(
            [reductions(window_class, micro_size, rank, size) for micro_size in (2, 7)]
        )
    ms.set_context(mode=ms.GRAPH_MODE)
    results["executed/SampleWindow"] = np.array(
        [executed_all_reduces(SampleWindow, micro_size, rank, size, out) for micro_size in (2, 7)]
    )
    results["executed/ReducesEachMicroBatch"] = np.array(
        [executed_all_reduces(ReducesEachMicroBatch, 7, rank, size, out)]
    )
    results["hand"] = np.array([hand_worked(rank, mean) for mean in (True, False)])
    results["model"] = train_by_model(rank, size)
    results["model apart"] = train_by_model(rank, size, start=1)
    for mode in ("graph", "pynative"):
        ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
        ms.set_auto_parallel_context(parameter_broadcast=True)
        results[f"model broadcast {mode}"] = train_by_model(rank, size, start=1)
    leave(out, rank, results)


def hand_worked(rank: int, mean: bool) -> float:
    """y ~ w x at w = 1, loss (w x - y)^2 / 2. Rank 0: x = 1, 2, y = 0, 1, gradients 1, 2, mean 1.5. Rank 1: x = 4, 2,
    y = 1, -4, gradients 12, 12, mean 12. Averaged 6.75, summed 13.5; the rate is 0.1."""
    ms.set_auto_parallel_context(gradients_mean=mean)
    x, y = (([1.0, 2.0], [0.0, 1.0]), ([4.0, 2.0], [1.0, -4.0]))[rank]
    cell = GradAccumulationCell(Line(1.0), 2)
    step = TrainOneStepWithGradAccumulationCell(cell, nn.SGD(cell.trainable_params(), 0.1)).set_train()
    step(ms.Tensor(x), ms.Tensor(y))
    return float(cell.network.weight.asnumpy())


def train_by_model(rank: int, size: int, start: int = 0) -> np.ndarray:
    """Two epochs of ms.Model on this rank's shard, as in a user's script; `start` sets the ranks' weights apart."""
    network = make_network("dense")
    for parameter in network.get_parameters():
        parameter.set_data(parameter + start * rank)
    x, y = batches(24, 1)[0]
    data_set = ms.dataset.NumpySlicesDataset((x, y), shuffle=False, num_shards=size, shard_id=rank).batch(8)
    cell = GradAccumulationCell(nn.WithLossCell(network, nn.CrossEntropyLoss()), 4)
    ms.set_auto_parallel_context(gradients_mean=True)
    ms.Model(cell, optimizer=nn.SGD(network.trainable_params(), 0.1)).train(2, data_set)
    return as_numpy(network.out.weight)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
