"""Python runs graphs to their end, and without other ranks."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms.backend.graphs import compiling_alone, run
from tests.support.reference import make_step


@pytest.mark.parametrize("asked_for", [True, False])
def test_compiles_without_a_broadcast_and_says_nothing_of_it_after(asked_for, parallel_context):
    parallel_context(parameter_broadcast=asked_for)
    with pytest.raises(RuntimeError, match="on the way"), compiling_alone():
        assert not ms.get_auto_parallel_context("parameter_broadcast")
        raise RuntimeError("on the way")
    assert ms.get_auto_parallel_context("parameter_broadcast") == asked_for


class SumOfRows(nn.Cell):
    def construct(self, x, rows):
        row, total = ms.Tensor(0, ms.int32), ms.Tensor(0.0, ms.float32)
        while row < rows:
            total = total + ops.gather(x, row.reshape((1,)), 0).sum()
            row = row + 1
        return total


X = np.random.default_rng(0).normal(size=(8, 4, 5)).astype(np.float32)
Y = X.sum(axis=2, keepdims=True) * 2


def views_of(array):
    """Eight batches, all of them views of other Tensors."""
    tensor = Tensor(array)
    transposed = Tensor(np.ascontiguousarray(array.transpose(0, 2, 1)))
    wider = Tensor(np.pad(array[6], ((0, 0), (1, 1))))
    rows = tensor.reshape((32, -1))
    return [
        tensor[0],
        rows[4:8],
        ops.split(rows, 4)[2],
        ops.chunk(rows, 8)[3],
        transposed[4].T,
        transposed[5].swapaxes(0, 1),
        wider[:, 1:-1],
        ops.unstack(tensor)[7],
    ]


def test_a_loop_reads_a_view_as_what_it_is(pynative):
    """MindSpore's own loop does not: it reads the Tensor behind the view, at a wrong place."""
    graph, rows = SumOfRows(), Tensor(4, ms.int32)
    sums = [float(run(graph, True, view, rows).asnumpy()) for view in views_of(X)]
    assert sums == pytest.approx(X.sum(axis=(1, 2), dtype=np.float64).tolist(), abs=1e-4)


# -- a Cell of ours that is compiled into a graph of the user's --------------------------------------------------------


def test_a_step_within_a_graph_trains_on_the_views_of_each_call(pynative):
    """MindSpore's loop reads a view of a later call where that of the first call was."""
    networks = [nn.WithLossCell(nn.Dense(5, 1, "ones", "zeros"), nn.MSELoss()) for _ in range(2)]
    step, plain = (make_step(network, micro_size=2) for network in networks)

    @ms.jit
    def train(x, y):
        return step(x, y) * 1

    losses = [float(train(x, y)) for x, y in zip(views_of(X), views_of(Y), strict=True)]
    assert losses == pytest.approx([float(plain(Tensor(x), Tensor(y))) for x, y in zip(X, Y, strict=True)], rel=1e-5)
