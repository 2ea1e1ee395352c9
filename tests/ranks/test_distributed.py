"""Data parallel mode on two real processes: how ranks begin alike, what they send, and what joins nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.communication import get_group_size, get_rank

from gaccum_ms import GradAccumulationCell, GradAccumulator
from gaccum_ms.distributed.all_reduce import FusedReducer
from gaccum_ms.distributed.ranks import broadcast_parameters
from tests.options.test_setups import MASKED
from tests.ranks.cases import named, set_up
from tests.support.history_oracle import Setup
from tests.support.history_setups import make_trainer, random_batch
from tests.support.reference import Line, Regression, as_numpy, batches, make_step, relative_error
from tests.support.two_ranks import Results, case, results_of

pytestmark = pytest.mark.distributed


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


def test_parameter_broadcast_starts_all_ranks_alike(ranks, pynative):
    """ms.Model broadcasts rank 0's weights, and the ranks train as one process that had begun with them. Rank r reads
    samples r, r + 2, ... An epoch has 2 batches of 6 on each rank, and 2 of 12 in one process. A rank's record of
    itself stays its own."""
    network = Regression()
    data_set = ms.dataset.NumpySlicesDataset(batches(24, 1)[0], shuffle=False).batch(12)
    ms.Model(network, optimizer=nn.SGD(network.trainable_params(), 0.1)).train(2, data_set)
    trained = [case(results, "broadcast") for results in ranks]
    assert relative_error(trained[0]["before"], trained[1]["before"]) > 0.1
    for rank, values in enumerate(trained):
        assert relative_error(values["after"], as_numpy(network.out)) < 2e-5
        assert values["origin"].tolist() == [rank, 2]


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


def test_parameter_broadcast_sends_each_dtype_as_it_is(ranks):
    for results in ranks:
        values = case(results, "dtypes")
        for name, sent in SENT.items():
            assert values[name].dtype == sent.dtype
            np.testing.assert_array_equal(values[name], sent)


def weighed_by_samples(out: Path) -> Results:
    """A loop of one's own: y ~ w x at w = 1, loss (w x - y)^2 / 2. Rank 0 has one sample, of gradient 1, and rank 1
    three, of gradients 1, 2 and 4. The rate is 0.1."""
    x, y = (([1.0], [0.0]), ([1.0, 1.0, 2.0], [0.0, -1.0, 0.0]))[get_rank()]
    weights = []
    for mean in (True, False):
        set_up(gradients_mean=mean)
        network = Line(1.0)
        accumulator = GradAccumulator(nn.SGD(network.trainable_params(), 0.1), 1, jit=False)
        _, gradients = accumulator.value_and_grad(network)(ms.Tensor(x), ms.Tensor(y))
        accumulator(gradients)
        weights.append(as_numpy(network.weight))
    return {"samples": np.array(weights)}


def test_a_loops_batches_weigh_by_their_samples_on_all_ranks(ranks):
    for results in ranks:
        np.testing.assert_allclose(results["samples"], [1 - 0.1 * 2, 1 - 0.1 * 2 * 2], rtol=1e-6)


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


# The sizes of the buffers of four batches. The gradient has four numbers, a window three sums, an open one four.
BUFFERS = {
    "samples": (Setup(micro_size=2), [[4]] * 4),
    "counts": (Setup(**MASKED), [[4 + 3]] * 4),
    "two losses": (  # their counts are sent before the loop
        Setup(loss="two masked", counts=("mask", None), micro_size=3, loss_weights=(1.0, 0.5)),
        [[2, 4 + 2]] * 4,
    ),
    "windows": (Setup(micro_size=2, steps=2), [[], [4 + 4]] * 2),
    "gradients": (Setup(accumulator=True, steps=2), [[], [4 + 4]] * 2),
}


def reductions(out: Path) -> Results:
    set_up(gradients_mean=False)
    results = {}
    for name, (setup, _) in BUFFERS.items():
        trainer, _ = make_trainer(setup, 0)
        ledger = trainer.ledger if setup.accumulator else trainer.window.ledger
        used = [] if name == "samples" else [ledger.sum_over_ranks.reducer]
        used += [] if setup.accumulator else [trainer.grad_reducer]
        noted, sizes = [NotedAllReduce(one) for one in used], []
        x, y, mask = map(ms.Tensor, random_batch(np.random.default_rng(get_rank()), setup, 6))
        for _ in range(4):
            if setup.accumulator:
                trainer((x[0], y[:1]))
            else:
                trainer(x, y, mask)
            sizes.append([size for one in noted for size in one.sizes])
            for one in noted:
                one.sizes.clear()
        results[name] = str(sizes)
    return named("reductions", results)


@pytest.mark.parametrize("name", BUFFERS)
def test_one_reduction_per_update(ranks, name):
    for results in ranks:
        assert str(case(results, "reductions")[name]) == str(BUFFERS[name][1])


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


def test_ranks_that_nothing_joins_are_told_so_once(ranks):
    first, second = (case(results, "apart") for results in ranks)
    assert first["warned"].tolist() == second["warned"].tolist() == [1, 1]
    assert relative_error(first["weight"], second["weight"]) > 1e-3


CASES: dict[str, Callable[[Path], Results]] = {
    "broadcast": train_by_model,
    "dtypes": by_dtype,
    "samples": weighed_by_samples,
    "reductions": reductions,
    "apart": apart,
}
ranks = results_of("test_distributed")
