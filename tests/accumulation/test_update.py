"""The end of a window: a flush that is interrupted is never repeated once the optimizer may have written."""

from __future__ import annotations

import warnings

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import GradAccumulationCell, GradAccumulator, TrainOneStepWithGradAccumulationCell, Transform
from tests.support.reference import as_numpy

X = Tensor(np.ones((2, 1), np.float32))


class Interrupted(Transform):
    """Raises once: before the optimizer, or after it."""

    def __init__(self, before, error):
        super().__init__()
        self.before, self.errors = before, [error]

    def change(self, gradients):
        self.raise_once(self.before)
        return gradients

    def after_update(self, after):
        self.raise_once(not self.before)
        return after

    def raise_once(self, here):
        if here and self.errors:
            raise self.errors.pop()


class HalfWritten(nn.Optimizer):
    """SGD with rate 0.1, which is interrupted once, in the middle of its writes."""

    errors: tuple = ()

    def construct(self, gradients):
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            ops.assign(parameter, parameter - 0.1 * gradient)
            if self.errors:
                error, *self.errors = self.errors
                raise error
        return True


def make(kind, transforms=(), errors=()):
    """A training with gradient -1 (accumulator) or -2 (step), at first, and the call that adds a batch."""
    net = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
    optimizer = HalfWritten(0.1, net.trainable_params())
    optimizer.errors = errors
    if kind == "accumulator":
        training = GradAccumulator(optimizer, 3, transforms=transforms, jit=False)
        return training, net, lambda: training((Tensor([[-1.0]], ms.float32),)), 0.1
    cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), accumulation_steps=3, transforms=transforms)
    training = TrainOneStepWithGradAccumulationCell(cell, optimizer).set_train()
    return training, net, lambda: training(X, X), 0.2


def weight(net):
    return pytest.approx(float(as_numpy(net.weight)[0, 0]))


def interrupt(training, add, how, error):
    """Two batches, and a third one or a flush, which is interrupted; the messages of the warnings."""
    add()
    add()
    with warnings.catch_warnings(record=True) as caught, pytest.raises(type(error)):
        warnings.simplefilter("always")
        training.flush() if how == "flush" else add()
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("how", ["flush", "call"])
@pytest.mark.parametrize("kind", ["step", "accumulator"])
@pytest.mark.parametrize("place", ["in", "after"])
def test_a_window_that_was_written_is_not_used_again(place, kind, how, pynative):
    error = KeyboardInterrupt()
    if place == "in":
        training, net, add, moved = make(kind, errors=[error])
    else:
        training, net, add, moved = make(kind, [Interrupted(False, error)])
    messages = interrupt(training, add, how, error)
    assert len(messages) == 1
    assert "were dropped. The next batch begins a new window" in messages[0]
    assert int(training.window_position.asnumpy()) == 0
    assert training.flush() is False
    assert moved == weight(net)
    for _ in range(3):
        add()
    assert weight(net) != moved


@pytest.mark.parametrize("kind", ["step", "accumulator"])
def test_a_flush_that_is_interrupted_before_the_optimizer_may_be_repeated(kind, pynative):
    error = KeyboardInterrupt()
    training, net, add, moved = make(kind, [Interrupted(True, error)])
    assert not interrupt(training, add, "flush", error)
    assert int(training.window_position.asnumpy()) == 2
    assert weight(net) == 0.0
    assert training.flush() is True
    assert moved == weight(net)
    assert training.flush() is False


@pytest.mark.parametrize("kind", ["step", "accumulator"])
def test_a_call_that_is_interrupted_before_the_optimizer_drops_its_window(kind, pynative):
    """The batch may be given again, and must not count twice."""
    error = KeyboardInterrupt()
    training, net, add, moved = make(kind, [Interrupted(True, error)])
    assert "a batch failed half-way" in interrupt(training, add, "call", error)[0]
    assert weight(net) == 0.0
    for _ in range(3):
        add()
    assert moved == weight(net)
