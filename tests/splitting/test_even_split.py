"""``split=EvenSplit(shared=...)``: inputs that are not cut. The oracle is the whole batch's step."""

from __future__ import annotations

import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import EvenSplit, GradAccumulationCell, audit, find_micro_batch_size
from gaccum_ms.splitting.micro_batches import SplitPlan, plan_split
from tests.support.modes import eagerly
from tests.support.reference import FEATURES, as_numpy, batches, make_step, relative_error

TOLERANCE = 1e-5
TABLE = np.random.default_rng(1).normal(size=(3, FEATURES)).astype(np.float32)  # fewer rows than there are samples
SCALE = np.float32(0.7)


class WithTable(nn.Cell):
    """Squared errors of predictions that use a table and a number, which all samples share."""

    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor(np.random.default_rng(2).normal(size=FEATURES), ms.float32), name="weight")

    def construct(self, x, table, scale, y):
        predictions = (ops.tanh(x * self.weight) @ table.T).sum(-1)
        return (ops.square(predictions - y) * scale).mean()


def weight_by_table(x, table, scale, y):
    """A count: the samples, times a number that depends on all shared inputs."""
    return x.shape[0] * (table * table).sum() * scale


def data_of(*sizes):
    return [
        (x, TABLE * (number + 1), SCALE, y.astype(np.float32))
        for number, (x, y) in enumerate(batches(size, 1, seed)[0] for seed, size in enumerate(sizes))
    ]


DATA = data_of(8, 8, 7)
TENSORS = [tuple(map(Tensor, batch)) for batch in DATA]
SHARED = EvenSplit(shared=(1, 2))


def momentum(weights):
    return nn.Momentum(weights, 0.001, 0.9)


def assert_equals_the_whole_batch(network, step, data, optimizer=momentum):
    """Our step trains as MindSpore's own on the same network, which is new."""
    losses = [float(step(*batch).asnumpy()) for batch in data]
    with eagerly():
        whole = nn.TrainOneStepCell(network, optimizer(network.trainable_params())).set_train()
        np.testing.assert_allclose(losses, [float(whole(*batch).asnumpy()) for batch in data], rtol=TOLERANCE)
    assert relative_error(as_numpy(step.weights[0]), as_numpy(network.weight)) < TOLERANCE


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("graph", {"micro_size": 3}),
        ("pynative", {"micro_batch_size": 3, "count": weight_by_table}),
        ("pynative", {"micro_size": 2, "record_noise": True, "overflow": "drop_micro_batch"}),
    ],
    indirect=["mode"],
)
def test_shared_inputs_reach_each_micro_batch_whole(mode, options):
    """In graph mode, one graph serves batches of all lengths."""
    step = make_step(WithTable(), momentum, split=SHARED, **options)
    if mode == "graph":
        rows, numbers = (Tensor(shape=shape, dtype=ms.float32) for shape in ([None, FEATURES], [None]))
        step.set_inputs(rows, TENSORS[0][1], TENSORS[0][2], numbers)
    assert_equals_the_whole_batch(WithTable(), step, TENSORS)
    assert len(step.compile_cache) == (mode == "graph")


def test_a_table_may_be_as_long_as_the_batch(pynative):
    x, _, scale, y = TENSORS[0]
    batch = x, Tensor(np.random.default_rng(4).normal(size=(8, FEATURES)).astype(np.float32)), scale, y
    assert_equals_the_whole_batch(WithTable(), make_step(WithTable(), momentum, split=SHARED, micro_size=2), [batch])


def test_audit_and_search_use_it(pynative):
    network = WithTable()
    optimizer = momentum(network.trainable_params())
    cell = GradAccumulationCell(network, 3, split=SHARED)
    assert audit(cell, optimizer, *TENSORS[0]).ok
    few = tuple(map(Tensor, data_of(2)[0]))  # few samples: few sizes are tried
    assert find_micro_batch_size(cell, optimizer, few) == 2


# -- samples on another axis -------------------------------------------------------------------------------------------


class TimeMajor(nn.Cell):
    """Inputs of shape (T, N, C), as for nn.GRU. The mask (T, C) is shared."""

    def __init__(self):
        super().__init__()
        random = np.random.default_rng(1)
        self.weight = ms.Parameter(Tensor(random.normal(size=(3, 4)) * 0.5, ms.float32), name="weight")

    def construct(self, x, mask, y):
        states = ops.tanh(((x * mask.expand_dims(1)) @ self.weight).sum(axis=0))
        return ops.square(states.sum(-1, keepdims=True) - y).mean()


def sgd(weights):
    return nn.SGD(weights, 0.1)


def length_weighted(x, mask, y):
    return x.shape[1] * (mask * mask).sum()


@pytest.mark.parametrize("options", [{"micro_size": 3}, {"micro_batch_size": 3, "count": length_weighted}])
def test_samples_on_axis_1(options, pynative):
    """Eight samples in three are 3 + 3 + 2; six time steps and three features are no samples."""
    random = np.random.default_rng(3)
    shapes = [((6, size, 3), (6, 3), (size, 1)) for size in (8, 7)]
    data = [tuple(Tensor(random.normal(size=shape), ms.float32) for shape in one) for one in shapes]
    step = make_step(TimeMajor(), sgd, split=EvenSplit(shared=(1,), axis=(1, 0, 0)), **options)
    assert_equals_the_whole_batch(TimeMajor(), step, data, sgd)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"shared": 1}, TypeError, "'shared' must be a tuple of ints, the positions of inputs, but got 1."),
        ({"shared": (2, 0)}, ValueError, "'shared' must have positions from 1 on, because the first input, number 0,"),
        ({"axis": "1"}, TypeError, "'axis' must be an int, the axis of samples, or a tuple with one for each input,"),
        ({"axis": -1}, ValueError, "'axis' must count axes from 0 on, but got -1."),
    ],
)
def test_refuses_bad_arguments(options, error, words):
    with pytest.raises(error, match=f"For 'EvenSplit', the argument {re.escape(words)}"):
        EvenSplit(**options)


@pytest.mark.parametrize(
    ("shapes", "shared", "axis", "words"),
    [
        ([(8, 2), (), (3,)], (1,), 0, "axis 0 of all inputs must have the same length"),
        ([(8, 2), (), (3,)], (2,), 0, "input 1 got shape"),
        ([(8, 2), ()], (1, 2), 0, r"that the batch has, but got EvenSplit\(shared=\(1, 2\)\) and a batch of 2"),
        ([(5, 8)], (), (1, 0), r"one for each, but got EvenSplit\(axis=\(1, 0\)\) and a batch of 1 input"),
        ([(5, 8), (8,)], (), 1, r"must have an axis 1 that counts samples, but input 1 got shape \(8,\)"),
    ],
)
def test_refuses_batches_that_do_not_fit(shapes, shared, axis, words):
    assert plan_split([(5, 8), (3,), (8, 2), ()], 3, None, (1, 3), (1, 0, 0, 0)) == SplitPlan(8, 3, 2, 2)
    with pytest.raises(ValueError, match=words):
        plan_split(shapes, 3, None, shared, axis)
