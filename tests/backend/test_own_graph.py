"""Python runs graphs compiled or eagerly, to their end, and without other ranks."""

from __future__ import annotations

import itertools
import os
import time

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import GradAccumulationCell, GradAccumulator, TrainOneStepWithGradAccumulationCell
from gaccum_ms.backend.graphs import OwnGraph, compiling_alone
from tests.support.alone import alone
from tests.support.environment import BLOCKING

seen: list[str] = []


@ops.constexpr
def note(what):
    """Python runs this once if the code around it is compiled, and at each run if that code is run eagerly."""
    seen.append(what)
    return 1


class AddOne(OwnGraph):
    def construct(self, x):
        return x + note("run")


@pytest.mark.parametrize(("jit", "runs"), [(False, 3), (True, 1)])
def test_in_pynative_mode_it_is_compiled_where_that_is_asked_for(jit, runs, pynative):
    seen.clear()
    cell = AddOne(jit)
    for _ in range(3):
        np.testing.assert_array_equal(cell.run_alone(Tensor([1.0, 2.0])).asnumpy(), [2.0, 3.0])
    assert len(seen) == runs


class Training(OwnGraph):
    def __init__(self, step):
        super().__init__(jit=True)
        self.step = step

    def construct(self, x, y):
        return self.step(x, y)


def waits():
    """How long Python waits for the loss after the call, as a part of the call's time, for ours and for a function."""
    os.environ.pop(BLOCKING, None)
    ms.set_context(mode=ms.PYNATIVE_MODE)
    network = nn.SequentialCell(nn.Dense(1024, 1024), nn.ReLU(), nn.Dense(1024, 1))
    optimizer = nn.Momentum(network.trainable_params(), 1e-3, 0.9)
    step = nn.TrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), optimizer).set_train()
    x, y = (Tensor(np.ones((1024, size), np.float32)) for size in (1024, 1))

    @ms.jit
    def function(x, y):
        return step(x, y)

    found = {}
    for name, call in (("own graph", Training(step).run_alone), ("function", function)):
        call(x, y).asnumpy()  # compiles
        start = time.perf_counter()
        loss = call(x, y)
        returned = time.perf_counter()
        loss.asnumpy()
        found[name] = (time.perf_counter() - returned) / (returned - start)
    return found


def test_compiled_in_pynative_mode_it_returns_when_all_is_done():
    """The control, a function under `mindspore.jit` , returns earlier. Python then waits in a busy loop, which takes a
    core from the computation. It needs a process with MindSpore's threads."""
    found = alone(waits)
    assert found["own graph"] < 0.2 < found["function"], found


@pytest.mark.parametrize("asked_for", [True, False])
def test_compiles_without_a_broadcast_and_says_nothing_of_it_after(asked_for):
    ms.set_auto_parallel_context(parameter_broadcast=asked_for)
    try:
        with pytest.raises(RuntimeError, match="on the way"), compiling_alone():
            assert not ms.get_auto_parallel_context("parameter_broadcast")
            raise RuntimeError("on the way")
        assert ms.get_auto_parallel_context("parameter_broadcast") == asked_for
    finally:
        ms.reset_auto_parallel_context()


class SumOfRows(OwnGraph):
    def construct(self, x, rows):
        row, total = ms.Tensor(0, ms.int32), ms.Tensor(0.0, ms.float32)
        while row < rows:
            total = total + ops.gather(x, row.reshape((1,)), 0).sum()
            row = row + 1
        return total


VIEWS = {
    "first rows": lambda x: x[:4],
    "rows": lambda x: x[2:6],
    "columns": lambda x: x[:, 1:4],
    "transposed": lambda x: x.T,
    "repeated": lambda x: x[:1].broadcast_to((4, 6)),
    "part": lambda x: ops.split(x, 4)[1],
    "whole": lambda x: x,
}


@pytest.mark.parametrize("mode", [ms.GRAPH_MODE, ms.PYNATIVE_MODE])
def test_a_loop_reads_a_view_as_what_it_is(mode):
    """MindSpore's own loop does not: it reads the Tensor behind the view, at a wrong place."""
    ms.set_context(mode=mode)
    x = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    graph = SumOfRows(jit=True)
    for name, view in VIEWS.items():
        given = view(Tensor(x))
        expected = given.asnumpy().sum(dtype=np.float64)
        rows = Tensor(given.shape[0], ms.int32)
        assert float(graph.run_alone(view(Tensor(x)), rows).asnumpy()) == pytest.approx(expected, abs=1e-4), name


# -- a Cell of ours that is compiled into a graph of the user's --------------------------------------------------------

X = np.random.default_rng(0).normal(size=(8, 4, 5)).astype(np.float32)
Y = X.sum(axis=2, keepdims=True) * 2


def views_of(array):
    """Eight batches, all of them views of other Tensors."""
    tensor = Tensor(array)
    transposed = Tensor(np.ascontiguousarray(array.transpose(0, 2, 1)))
    rows = tensor.reshape((32, -1))
    return [
        tensor[0],
        rows[4:8],
        ops.split(rows, 4)[2],
        ops.chunk(rows, 8)[3],
        transposed[4].T,
        transposed[5].swapaxes(0, 1),
        *ops.unstack(tensor)[6:],
    ]


class Outer(nn.Cell):
    def __init__(self, step):
        super().__init__()
        self.step = step

    def construct(self, x, y):
        return self.step(x, y) * 1


def in_jit(step):
    @ms.jit
    def train(x, y):
        return step(x, y) * 1

    return train


def by_turns(step):
    """Directly, and within a graph."""
    ways = itertools.cycle((step, in_jit(step)))
    return lambda x, y: next(ways)(x, y)


def losses(call, batches, **options):
    network = nn.WithLossCell(nn.Dense(5, 1, "ones", "zeros"), nn.MSELoss())
    cell = GradAccumulationCell(network, 2, **options)
    step = TrainOneStepWithGradAccumulationCell(cell, nn.SGD(network.trainable_params(), 0.01)).set_train()
    train = call(step)
    return [float(train(x, y)) for x, y in batches]


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (in_jit, {}),
        (Outer, {}),
        pytest.param(in_jit, {"accumulation_steps": 3}, marks=pytest.mark.thorough),
        pytest.param(in_jit, {"record_noise": True}, marks=pytest.mark.thorough),
        pytest.param(by_turns, {}, marks=pytest.mark.thorough),
    ],
    ids=["jit", "Cell", "window", "noise", "by turns"],
)
def test_a_step_within_a_graph_trains_on_the_views_that_it_is_given(call, options, mode):
    """MindSpore's loop reads a view of a later call where that of the first call was."""
    copies = [(Tensor(x), Tensor(y)) for x, y in zip(X, Y, strict=True)]
    views = list(zip(views_of(X), views_of(Y), strict=True))
    expected = losses(lambda step: step, copies, **options)
    assert losses(call, views, **options) == pytest.approx(expected, rel=1e-5)


@pytest.mark.core(mode="graph")
def test_an_accumulator_within_a_graph_adds_the_views_that_it_is_given(mode):
    found = []
    for gradients in ([Tensor(x) for x in X], views_of(X)):
        weight = ms.Parameter(Tensor(np.zeros((4, 5), np.float32)), name="weight")
        accumulator = GradAccumulator(nn.SGD([weight], 1.0), 2)

        @ms.jit
        def add(gradient, count, accumulator=accumulator):
            return accumulator((gradient,), count)

        for gradient in gradients:
            add(gradient, Tensor(2.0))
        found.append(weight.asnumpy())
    np.testing.assert_allclose(found[1], found[0], atol=1e-6)
    np.testing.assert_allclose(found[0], -X.sum(axis=0) / 2, atol=1e-5)
