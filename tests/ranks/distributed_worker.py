"""The cases of test_distributed.py on ranks (support/ranks.py): trainings in data parallel mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.communication import get_group_size, get_rank

from gaccum_ms import Accumulators, ClipByValue, GradAccumulationCell, GradAccumulator
from gaccum_ms.distributed.ranks import broadcast_parameters
from tests.ranks.cases import named, set_up
from tests.support.reference import (
    OPTIMIZERS,
    Line,
    Regression,
    accumulated,
    as_numpy,
    batches,
    make_step,
    train,
)
from tests.support.two_ranks import Results

PER_RANK, UPDATES = 7, 3  # 7 samples are ragged in 3 micro-batches


def joined(out: Path) -> Results:
    """Train on this rank's share of each joint batch."""
    network, (rank, size) = Regression(), (get_rank(), get_group_size())
    shares = [(x[rank::size], y[rank::size]) for x, y in batches(PER_RANK * size, UPDATES)]
    optimizer = OPTIMIZERS["momentum"](network.trainable_params())
    result = train(accumulated(micro_size=3), network, optimizer, shares)
    return named("joined", {"losses": result.losses, **result.state})


def hand_worked(out: Path) -> Results:
    """y ~ w x at w = 1, loss (w x - y)^2 / 2. Rank 0: x = 1, 2, y = 0, 1, gradients 1, 2, mean 1.5. Rank 1: x = 4, 2,
    y = 1, -4, gradients 12, 12, mean 12. Averaged 6.75, summed 13.5; the rate is 0.1."""
    x, y = (([1.0, 2.0], [0.0, 1.0]), ([4.0, 2.0], [1.0, -4.0]))[get_rank()]
    weights = []
    for mean in (True, False):
        set_up(gradients_mean=mean)
        step = make_step(Line(1.0), micro_size=2)
        step(ms.Tensor(x), ms.Tensor(y))
        weights.append(float(step.weights[0].asnumpy()))
    return {"hand": np.array(weights)}


def train_by_model(out: Path) -> Results:
    """Two epochs of ms.Model on this rank's shard, as in a user's script, from ranks' weights that are apart. Returns
    a weight before and after, and the rank and the number of ranks in the step's record of its window."""
    set_up()
    ms.set_auto_parallel_context(parameter_broadcast=True)
    network, (rank, size) = Regression(), (get_rank(), get_group_size())
    for parameter in network.get_parameters():
        parameter.set_data(parameter + rank)
    before = as_numpy(network.out)
    x, y = batches(24, 1)[0]
    data_set = ms.dataset.NumpySlicesDataset((x, y), shuffle=False, num_shards=size, shard_id=rank).batch(6)
    model = ms.Model(GradAccumulationCell(network, 4), optimizer=nn.SGD(network.trainable_params(), 0.1))
    model.train(2, data_set)
    origin = as_numpy(model.train_network.run_record.window_origin)
    return named("broadcast", {"before": before, "after": as_numpy(network.out), "origin": origin})


def one_and_two_micro_batches(out: Path) -> Results:
    """Rank 0's batch is one micro-batch, which needs no accumulators, and rank 1's two. They clip each element too."""
    set_up()
    samples = (2, 6)[get_rank()]
    options = {"accumulators": Accumulators(ms.bfloat16), "transforms": (ClipByValue(10.0),)}
    step = make_step(Regression(), micro_batch_size=5, **options)
    step(*map(ms.Tensor, batches(samples, 1, seed=get_rank())[0]))
    return named("uneven", {weight.name: as_numpy(weight) for weight in step.weights})


def apart(out: Path) -> Results:
    """Training without a parallel mode: the numbers of warnings of the step and of an accumulator, over three batches
    each; and the weight, which then is each rank's own."""
    set_up()
    ms.set_auto_parallel_context(parallel_mode="stand_alone")
    x, y = map(ms.Tensor, batches(6, 1, seed=get_rank())[0])
    network = Regression()
    step = make_step(network, micro_size=2)
    accumulator = GradAccumulator(step.optimizer, 2)
    gradients = ms.grad(network, None, step.optimizer.parameters)(x, y)
    warned = []
    for call in (lambda: step(x, y), lambda: accumulator(gradients)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                call()
        texts = [str(warning.message) for warning in caught]
        assert all("set_auto_parallel_context(parallel_mode='data_parallel'" in text for text in texts), texts
        warned.append(len(texts))
    return named("apart", {"warned": warned, "weight": as_numpy(network.out)})


SENT = {
    "float64": np.array([[1 / 3], [1e300]]),
    "float32": np.array([1 / 3, 1e-40], np.float32),
    "int64": np.array([2**40 + 1, -(2**62)], np.int64),
    "int32": np.array([2**31 - 1, 2**24 + 1, -7], np.int32),
    "bool": np.array([True, False, True]),
}


def by_dtype(out: Path) -> Results:
    """Parameters that rank 1 has as zeros, after rank 0 has sent them."""
    cell = nn.Cell()
    for name, value in SENT.items():
        cell.insert_param_to_cell(name, ms.Parameter(ms.Tensor(value * (get_rank() == 0))))
    ms.set_auto_parallel_context(parameter_broadcast=True)
    broadcast_parameters(cell)
    return {f"dtypes/{name}": getattr(cell, name).asnumpy() for name in SENT}


CASES: dict[str, Callable[[Path], Results]] = {
    "joined": joined,
    "hand": hand_worked,
    "broadcast": train_by_model,
    "dtypes": by_dtype,
    "uneven": one_and_two_micro_batches,
    "apart": apart,
}
