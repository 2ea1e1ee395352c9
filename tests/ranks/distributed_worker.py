"""The cases of the distributed tests on ranks (support/ranks.py): trainings in data parallel mode."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank
from mindspore.profiler import ProfilerActivity, profile, tensorboard_trace_handler

from gaccum_ms import GradAccumulationCell, GradAccumulator, TrainOneStepWithGradAccumulationCell
from gaccum_ms.accumulation.weighing import BySamples
from gaccum_ms.distributed.all_reduce import FusedReducer
from gaccum_ms.distributed.ranks import broadcast_parameters
from tests.support.modes import MODES
from tests.support.reference import OPTIMIZERS, Line, Regression, accumulated, as_numpy, batches, step_with, train
from tests.support.two_ranks import Results

PER_RANK, UPDATES = 7, 3  # 7 samples are ragged in 3 micro-batches


class ReducesEachMicroBatch(BySamples):
    """Negative control for the number of collectives: the result is right, but each micro-batch is reduced."""

    def run(self, noted, seed_per_item, prepared, size, *micro_batch):
        part, gradients = super().run(noted, seed_per_item, prepared, size, *micro_batch)
        return part, self.grad_reducer(gradients)

    def reduce(self, gradients, sums, scale, seed_per_item):
        return gradients, scale, sums / scale, True


class NotedAllReduce:
    """Replaces a reducer's AllReduce in an eagerly run step, and records the size of each buffer that is sent."""

    def __init__(self, reducer: FusedReducer) -> None:
        self.all_reduce = reducer.all_reduce
        self.sizes: list[int] = []
        del reducer.all_reduce
        reducer.all_reduce = self

    def __call__(self, buffer):
        self.sizes.append(buffer.size)
        return self.all_reduce(buffer)


def run(make_step):
    """Train on this rank's share of each joint batch."""
    network, (rank, size) = Regression(), (get_rank(), get_group_size())
    shares = [(x[rank::size], y[rank::size]) for x, y in batches(PER_RANK * size, UPDATES)]
    return train(make_step, network, OPTIMIZERS["momentum"](network.trainable_params()), shares)


def reductions(weighing, micro_size: int) -> int:
    noted = []

    def make_step(loss_cell, optimizer):
        step = step_with(weighing=weighing)(GradAccumulationCell(loss_cell, micro_size), optimizer)
        noted.append(NotedAllReduce(step.window.weighing.grad_reducer))
        return step

    run(make_step)
    return len(noted[0].sizes)


def executed_all_reduces(weighing, micro_size: int, out: Path) -> int:
    """AllReduce kernels that MindSpore's profiler saw run in UPDATES updates of the compiled step."""
    steps = []

    def make_step(loss_cell, optimizer):
        steps.append(step_with(weighing=weighing)(GradAccumulationCell(loss_cell, micro_size), optimizer))
        return steps[0]

    run(make_step)  # compiles
    rank, size = get_rank(), get_group_size()
    folder = out / f"profile-{weighing.__name__}-{micro_size}-{rank}"
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


def hand_worked(mean: bool) -> float:
    """y ~ w x at w = 1, loss (w x - y)^2 / 2. Rank 0: x = 1, 2, y = 0, 1, gradients 1, 2, mean 1.5. Rank 1: x = 4, 2,
    y = 1, -4, gradients 12, 12, mean 12. Averaged 6.75, summed 13.5; the rate is 0.1."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    ms.set_auto_parallel_context(gradients_mean=mean)
    x, y = (([1.0, 2.0], [0.0, 1.0]), ([4.0, 2.0], [1.0, -4.0]))[get_rank()]
    cell = GradAccumulationCell(Line(1.0), 2)
    step = TrainOneStepWithGradAccumulationCell(cell, nn.SGD(cell.trainable_params(), 0.1)).set_train()
    step(ms.Tensor(x), ms.Tensor(y))
    return float(cell.network.weight.asnumpy())


def train_by_model(start: int = 0) -> Results:
    """Two epochs of ms.Model on this rank's shard, as in a user's script; `start` sets the ranks' weights apart.
    Returns a weight before and after, and the rank and the number of ranks in the step's record of its window."""
    network, (rank, size) = Regression(), (get_rank(), get_group_size())
    for parameter in network.get_parameters():
        parameter.set_data(parameter + start * rank)
    before = as_numpy(network.out)
    x, y = batches(24, 1)[0]
    data_set = ms.dataset.NumpySlicesDataset((x, y), shuffle=False, num_shards=size, shard_id=rank).batch(6)
    cell = GradAccumulationCell(network, 4)
    ms.set_auto_parallel_context(gradients_mean=True)
    model = ms.Model(cell, optimizer=nn.SGD(network.trainable_params(), 0.1))
    model.train(2, data_set)
    origin = as_numpy(model.train_network.run_record.window_origin)
    return {"before": before, "after": as_numpy(network.out), "origin": origin}


def apart(mode: str) -> Callable[[Path], Results]:
    """Training without a parallel mode: the numbers of warnings of the step and of an accumulator, over three batches
    each; and the weight, which then is each rank's own."""

    def case(out: Path) -> Results:
        ms.set_context(mode=MODES[mode])
        ms.set_auto_parallel_context(parallel_mode="stand_alone")
        x, y = map(ms.Tensor, batches(6, 1, seed=get_rank())[0])
        network = Regression()
        cell = GradAccumulationCell(network, 2)
        optimizer = nn.SGD(network.trainable_params(), 0.1)
        step = TrainOneStepWithGradAccumulationCell(cell, optimizer).set_train()
        accumulator = GradAccumulator(optimizer, 2)
        gradients = ms.grad(network, None, optimizer.parameters)(x, y)
        warned = []
        for call in (lambda: step(x, y), lambda: accumulator(gradients)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(3):
                    call()
            texts = [str(one.message) for one in caught]
            assert all("set_auto_parallel_context(parallel_mode='data_parallel'" in text for text in texts), texts
            warned.append(len(texts))
        name = f"apart {mode}"
        return {f"{name}/warned": np.array(warned), f"{name}/weight": as_numpy(network.out)}

    return case


# -- all cases ---------------------------------------------------------------------------------------------------------


def trained(name: str, mode: str, mean: bool, make_step: Callable) -> Callable[[Path], Results]:
    def case(out: Path) -> Results:
        ms.set_context(mode=MODES[mode])
        ms.set_auto_parallel_context(gradients_mean=mean)
        result = run(make_step)
        return {f"{name}/losses": result.losses} | {f"{name}/{key}": value for key, value in result.state.items()}

    return case


def eager_reductions(out: Path) -> Results:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    return {
        f"reductions/{weighing.__name__}": np.array(reductions(weighing, 3))
        for weighing in (BySamples, ReducesEachMicroBatch)
    }


def executed(weighing: type) -> Callable[[Path], Results]:
    name = f"executed {weighing.__name__}"
    return lambda out: {name: np.array(executed_all_reduces(weighing, 7, out))}


def by_model(out: Path) -> Results:
    return {f"model/{key}": value for key, value in train_by_model().items()}


def by_broadcast(mode: str) -> Callable[[Path], Results]:
    def case(out: Path) -> Results:
        ms.set_context(mode=MODES[mode])
        ms.set_auto_parallel_context(parameter_broadcast=True)
        return {f"model broadcast {mode}/{key}": value for key, value in train_by_model(start=1).items()}

    return case


def by_dtype(out: Path) -> Results:
    """Parameters that rank 1 has as zeros, after rank 0 has sent them."""
    cell = nn.Cell()
    for name, value in SENT.items():
        cell.insert_param_to_cell(name, ms.Parameter(ms.Tensor(value * (get_rank() == 0))))
    ms.set_auto_parallel_context(parameter_broadcast=True)
    broadcast_parameters(cell)
    return {f"dtypes/{name}": getattr(cell, name).asnumpy() for name in SENT}


SENT = {
    "float64": np.array([[1 / 3], [1e300]]),
    "float32": np.array([1 / 3, 1e-40], np.float32),
    "float16": np.array([0.1, 65504], np.float16),
    "int64": np.array([2**40 + 1, -(2**62)], np.int64),
    "int32": np.array([2**31 - 1, 2**24 + 1, -7], np.int32),
    "uint8": np.array([[1, 2, 255]], np.uint8),
    "bool": np.array([True, False, True]),
}
STEPS: dict[str, Callable] = {
    "whole": nn.TrainOneStepCell,
    "1": accumulated(micro_size=1),
    "3": accumulated(micro_size=3),
}
TRAINED: dict[str, tuple[str, bool, Callable]] = {
    **{
        f"{mode}-mean{mean:d}-{way}": (mode, mean, make_step)
        for mode in MODES
        for mean in (True, False)
        for way, make_step in STEPS.items()
    },
    "jit-mean0-3": ("pynative", False, accumulated(micro_size=3, jit=True)),
    "clip-mean0-whole": ("pynative", False, clipped_whole),
    "clip-mean0-3": ("pynative", False, accumulated(micro_size=3, max_grad_norm=0.5)),
}
CASES: dict[str, Callable[[Path], Results]] = {
    **{name: trained(name, *case) for name, case in TRAINED.items()},
    "reductions": eager_reductions,
    "hand": lambda out: {"hand": np.array([hand_worked(mean) for mean in (True, False)])},
    **{f"executed {weighing.__name__}": executed(weighing) for weighing in (BySamples, ReducesEachMicroBatch)},
    "model": by_model,
    **{f"model broadcast {mode}": by_broadcast(mode) for mode in MODES},
    "dtypes": by_dtype,
    **{f"apart {mode}": apart(mode) for mode in MODES},
}
