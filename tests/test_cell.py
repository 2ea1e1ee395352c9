"""GradAccumulationCell's options, and what happens where the cell is used in a place that does not accumulate."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor, nn, value_and_grad
from reference import batches, make_network

from gaccum_ms import GradAccumulationCell


def loss_cell():
    return nn.WithLossCell(make_network("dense"), nn.CrossEntropyLoss())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"micro_size": 1.5}, TypeError, "'micro_size' must be an int, but got 1.5 of type 'float'"),
        ({"micro_size": "4"}, TypeError, "'micro_size' must be an int, but got '4'"),
        ({"micro_size": True}, TypeError, "'micro_size' must be an int, but got True"),
        ({"micro_size": 0}, ValueError, "'micro_size' must be at least 1, but got 0"),
        ({"micro_size": -2}, ValueError, "'micro_size' must be at least 1, but got -2"),
        ({"micro_batch_size": False}, TypeError, "'micro_batch_size' must be an int, but got False"),
        ({"micro_batch_size": 0}, ValueError, "'micro_batch_size' must be at least 1, but got 0"),
        ({"micro_size": 2, "micro_batch_size": 2}, ValueError, "exactly one of .*micro_size=2, micro_batch_size=2"),
        ({}, ValueError, "exactly one of .*micro_size=None, micro_batch_size=None and accumulation_steps=1"),
        ({"accumulation_steps": 0}, ValueError, "'accumulation_steps' must be at least 1, but got 0"),
        ({"accumulation_steps": 2.0}, TypeError, "'accumulation_steps' must be an int, but got 2.0 of type 'float'"),
        (
            {"accumulation_steps": 3, "loss_weights": (1.0, 0.5)},
            ValueError,
            "'accumulation_steps' must be 1 for a network of several losses, .*got accumulation_steps=3 and 2 losses",
        ),
        ({"micro_size": 2, "max_grad_norm": float("nan")}, ValueError, "'max_grad_norm' must be positive .* got nan"),
        ({"micro_size": 2, "max_grad_norm": float("inf")}, ValueError, "'max_grad_norm' must be positive .* got inf"),
        ({"micro_size": 2, "max_grad_norm": 0.0}, ValueError, "'max_grad_norm' must be positive .* got 0.0"),
        ({"micro_size": 2, "max_grad_norm": "1"}, TypeError, "'max_grad_norm' must be a float, but got '1'"),
        ({"micro_size": 2, "max_grad_norm": True}, TypeError, "'max_grad_norm' must be a float, but got True"),
        ({"micro_size": 2, "jit": 1}, TypeError, "'jit' must be a bool or None, but got 1"),
    ],
)
def test_refuses_bad_options(options, error, message):
    with pytest.raises(error, match=f"For 'GradAccumulationCell', .*{message}"):
        GradAccumulationCell(loss_cell(), **options)


def test_refuses_a_network_that_is_no_cell():
    with pytest.raises(TypeError, match="'network' must be a Cell, but got 'function'"):
        GradAccumulationCell(lambda x: x, 2)


def test_called_by_itself_it_is_the_network(mode):
    batch = [Tensor(value) for value in batches(6)[0]]
    np.testing.assert_array_equal(GradAccumulationCell(loss_cell(), 4)(*batch).asnumpy(), loss_cell()(*batch).asnumpy())


class Doubled(nn.Cell):
    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, x, y):
        return 2 * self.network(x, y)


@pytest.mark.parametrize("wrap", [lambda cell: cell, Doubled], ids=["outermost", "buried"])
def test_never_trained_without_accumulating(wrap, mode):
    network = wrap(GradAccumulationCell(loss_cell(), 2)).set_train()
    weights = [parameter.asnumpy().copy() for parameter in network.get_parameters()]
    with pytest.raises(RuntimeError, match="the cell itself is being trained"):
        network(*map(Tensor, batches(6)[0]))
    for weight, parameter in zip(weights, network.get_parameters(), strict=True):
        np.testing.assert_array_equal(parameter.asnumpy(), weight)


def test_a_functional_gradient_in_training_is_refused(mode):
    cell = GradAccumulationCell(loss_cell(), 2).set_train()
    gradient = value_and_grad(cell, None, tuple(cell.trainable_params()))
    with pytest.raises(RuntimeError, match="the cell itself is being trained"):
        gradient(*map(Tensor, batches(6)[0]))


def test_mindspores_own_training_steps_refuse_it():
    cell = GradAccumulationCell(loss_cell(), 2)
    optimizer = nn.SGD(cell.trainable_params(), 0.1)
    for step in (nn.TrainOneStepCell, nn.wrap.cell_wrapper._TrainGradAccuStepCell):
        with pytest.raises(RuntimeError, match=r"gaccum_ms.TrainOneStepWithGradAccumulationCell\(cell, optimizer\)"):
            step(cell, optimizer)
