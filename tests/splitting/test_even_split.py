"""``split=EvenSplit(shared=...)``: inputs that are not cut. The oracle is the whole batch's step."""

from __future__ import annotations

import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import (
    EvenSplit,
    GradAccumulationCell,
    WithBatchLossCell,
    audit,
    find_micro_batch_size,
)
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


def step_of(network=WithTable, **options):
    return make_step(network(), lambda weights: nn.Momentum(weights, 0.001, 0.9), **{"split": SHARED, **options})


@eagerly()
def whole(data):
    network = WithTable()
    step = nn.TrainOneStepCell(network, nn.Momentum(network.trainable_params(), 0.001, 0.9)).set_train()
    losses = [float(step(*batch).asnumpy()) for batch in data]
    return losses, as_numpy(network.weight)


OPTIONS = {
    "number": {"micro_size": 3},
    "count": {"micro_batch_size": 3, "count": weight_by_table},
    "noise": {"micro_size": 2, "record_noise": True, "overflow": "drop_micro_batch"},
}


@pytest.mark.core(mode="pynative")
@pytest.mark.parametrize(
    ("name", "mode"), [("number", "graph"), ("count", "pynative"), ("noise", "pynative")], indirect=["mode"]
)
def test_shared_inputs_reach_each_micro_batch_whole(name, mode):
    """In graph mode, one graph serves batches of all lengths."""
    step = step_of(**OPTIONS[name])
    if mode == "graph":
        rows, numbers = (Tensor(shape=shape, dtype=ms.float32) for shape in ([None, FEATURES], [None]))
        step.set_inputs(rows, TENSORS[0][1], TENSORS[0][2], numbers)
    losses = [float(step(*batch).asnumpy()) for batch in TENSORS]
    whole_losses, weight = whole(TENSORS)
    np.testing.assert_allclose(losses, whole_losses, rtol=TOLERANCE)
    assert relative_error(as_numpy(step.weights[0]), weight) < TOLERANCE
    assert len(step.compile_cache) == (mode == "graph")


def test_windows_of_several_batches_weigh_them_by_their_counts(pynative):
    """Each batch has another table, so that there is no joined batch: gradients are added up by hand."""
    step = step_of(micro_size=2, accumulation_steps=2, count=weight_by_table)
    network = WithTable()
    gradient = ms.value_and_grad(network, None, network.trainable_params())
    batches_of_window = [
        (float(weight_by_table(*batch)), *map(as_numpy, (loss, *gradients)))
        for batch in TENSORS[:2]
        for loss, gradients in [gradient(*batch)]
    ]
    total = sum(count for count, _, _ in batches_of_window)
    for batch in TENSORS[:2]:
        step(*batch)
    expected = as_numpy(network.weight) - 0.001 * sum(count * slope for count, _, slope in batches_of_window) / total
    assert relative_error(as_numpy(step.weights[0]), expected) < TOLERANCE
    loss = sum(count * loss for count, loss, _ in batches_of_window) / total
    assert float(step.window_loss.asnumpy()) == pytest.approx(loss, rel=TOLERANCE)


def test_a_table_may_be_as_long_as_the_batch(pynative):
    """The control: an input with as many rows as samples is cut, unless it is shared."""
    x, _, scale, y = TENSORS[0]
    batch = x, Tensor(np.random.default_rng(4).normal(size=(8, FEATURES)).astype(np.float32)), scale, y
    _, weight = whole([batch])
    step = step_of(micro_size=2)
    step(*batch)
    assert relative_error(as_numpy(step.weights[0]), weight) < TOLERANCE

    class OwnScale(WithTable):
        def construct(self, x, table, y):
            return super().construct(x, table, Tensor(SCALE), y)

    step = step_of(OwnScale, micro_size=2, split=EvenSplit(), check=None)
    step(batch[0], batch[1], batch[3])
    assert relative_error(as_numpy(step.weights[0]), weight) > 100 * TOLERANCE


class Rows(WithTable):
    """Representations of a loss that compares all samples of the batch."""

    def construct(self, x, table, scale):
        return ops.tanh(x * self.weight) @ table.T * scale


class Spread(nn.Cell):
    def construct(self, rows):
        return ops.square(rows - rows.mean(axis=0)).mean()


def test_a_loss_of_the_whole_batch(pynative):
    """Losses and weights, with three micro-batches and with one."""
    results = []
    for micro_size in (3, 1):
        network = WithBatchLossCell(Rows(), Spread())
        step = make_step(network, lambda weights: nn.Momentum(weights, 0.01, 0.9), micro_size=micro_size, split=SHARED)
        losses = [float(step(*batch[:3]).asnumpy()) for batch in TENSORS]
        results.append(np.array([*losses, *as_numpy(step.weights[0])]))
    assert relative_error(*results) < TOLERANCE


def test_audit_and_search_use_it(pynative):
    network = WithTable()
    optimizer = nn.Momentum(network.trainable_params(), 0.001, 0.9)
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


def time_major(*sizes):
    random = np.random.default_rng(3)
    shapes = [((6, size, 3), (6, 3), (size, 1)) for size in sizes]
    return [tuple(Tensor(random.normal(size=shape), ms.float32) for shape in one) for one in shapes]


def length_weighted(x, mask, y):
    return x.shape[1] * (mask * mask).sum()


def time_major_step(**options):
    return make_step(TimeMajor(), split=EvenSplit(shared=(1,), axis=(1, 0, 0)), **options)


@eagerly()
def whole_time_major(data):
    network = TimeMajor()
    step = nn.TrainOneStepCell(network, nn.SGD(network.trainable_params(), 0.1)).set_train()
    return [float(step(*batch).asnumpy()) for batch in data], [as_numpy(one) for one in step.weights]


@pytest.mark.core(mode="pynative")
@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({"micro_size": 3}, "graph"),
        ({"micro_size": 3}, "pynative"),
        ({"micro_batch_size": 3, "count": length_weighted}, "pynative"),
    ],
    ids=["graph of open length", "samples", "count"],
    indirect=["mode"],
)
def test_samples_on_axis_1(options, mode):
    """Eight samples in three are 3 + 3 + 2; six time steps and three features are no samples."""
    data = time_major(8, 7)
    step = time_major_step(**options)
    if mode == "graph":
        step.set_inputs(*(Tensor(shape=shape, dtype=ms.float32) for shape in ([6, None, 3], [6, 3], [None, 1])))
    losses = [float(step(*batch).asnumpy()) for batch in data]
    whole_losses, weights = whole_time_major(data)
    np.testing.assert_allclose(losses, whole_losses, rtol=TOLERANCE)
    assert max(map(relative_error, map(as_numpy, step.weights), weights)) < TOLERANCE
    assert len(step.compile_cache) == (mode == "graph")


def test_windows_weigh_batches_by_samples_on_axis_1(pynative):
    first, second = time_major(8, 4)
    second = (second[0], first[1], second[2])  # the same mask, so that the batches can be joined
    step = time_major_step(micro_size=2, accumulation_steps=2)
    step(*first), step(*second)
    joined = ops.concat((first[0], second[0]), 1), first[1], ops.concat((first[2], second[2]))
    losses, weights = whole_time_major([joined])
    assert float(step.window_loss.asnumpy()) == pytest.approx(losses[0], rel=TOLERANCE)
    assert max(map(relative_error, map(as_numpy, step.weights), weights)) < TOLERANCE


@pytest.mark.parametrize(
    ("axis", "error", "words"),
    [
        ("1", TypeError, "must be an int, the axis of samples, or a tuple with one for each input, but got '1'."),
        ((0, True), TypeError, "but got (0, True)."),
        (-1, ValueError, "must count axes from 0 on, but got -1."),
    ],
)
def test_what_an_axis_can_be(axis, error, words):
    with pytest.raises(error, match=f"For 'EvenSplit', the argument 'axis' .*{re.escape(words)}"):
        EvenSplit(axis=axis)


def test_axes_that_a_batch_does_not_have():
    assert plan_split([(5, 8), (8, 2), ()], 3, None, (2,), (1, 0, 0)) == SplitPlan(8, 3, 2, 2)
    with pytest.raises(ValueError, match=r"one for each, but got EvenSplit\(axis=\(1, 0\)\) and a batch of 1 input"):
        plan_split([(5, 8)], 3, None, (), (1, 0))
    with pytest.raises(ValueError, match=r"must have an axis 1 that counts samples, but input 1 got shape \(8,\)"):
        plan_split([(5, 8), (8,)], 3, None, (), 1)
    with pytest.raises(ValueError, match=r"the axes \(1, 0\) of all inputs must have the same length"):
        plan_split([(5, 8), (5, 8)], 3, None, (), (1, 0))


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shared", "error", "words"),
    [
        (1, TypeError, "must be a tuple of ints, the positions of inputs, but got 1."),
        ((True,), TypeError, "must be a tuple of ints, the positions of inputs, but got (True,)."),
        ((2, 0), ValueError, "must have positions from 1 on, because the first input, number 0, says how many samples"),
        ((-1,), ValueError, "but got (-1,)."),
    ],
)
def test_what_can_be_shared(shared, error, words):
    with pytest.raises(error, match=f"For 'EvenSplit', the argument 'shared' .*{re.escape(words)}"):
        EvenSplit(shared)


def test_positions_are_a_set():
    assert EvenSplit([2, 1, 2]) == EvenSplit((1, 2))
    assert repr(EvenSplit([2])) == "EvenSplit(shared=(2,), axis=0)"


def test_a_plan_looks_at_what_is_cut_alone():
    assert plan_split([(8, 2), (), (3,), (8,)], 3, None, (1, 2)) == SplitPlan(8, 3, 2, 2)
    with pytest.raises(ValueError, match="axis 0 of all inputs must have the same length"):
        plan_split([(8, 2), (), (3,)], 3, None, (1,))
    with pytest.raises(ValueError, match="input 1 got shape"):
        plan_split([(8, 2), (), (3,)], 3, None, (2,))
    with pytest.raises(ValueError, match=r"that the batch has, but got EvenSplit\(shared=\(1, 2\)\) and a batch of 2"):
        plan_split([(8, 2), ()], 3, None, (1, 2))
