"""The end of a window that is interrupted while the optimizer writes is never repeated. Before and after it:
options/test_setups.py."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import GradAccumulator
from tests.support.reference import as_numpy, make_step

X = Tensor(np.ones((2, 1), np.float32))


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


def make(kind):
    """A training with gradient -1 (accumulator) or -2 (step), at first, and the call that adds a batch."""
    net = nn.Dense(1, 1, weight_init="zeros", has_bias=False)
    optimizer = HalfWritten(0.1, net.trainable_params())
    optimizer.errors = [KeyboardInterrupt()]
    if kind == "accumulator":
        training = GradAccumulator(optimizer, 3, jit=False)
        return training, net, lambda: training((Tensor([[-1.0]], ms.float32),)), 0.1
    training = make_step(nn.WithLossCell(net, nn.MSELoss()), lambda _: optimizer, accumulation_steps=3)
    return training, net, lambda: training(X, X), 0.2


@pytest.mark.parametrize(("kind", "how"), [("step", "flush"), ("accumulator", "call")])
def test_a_window_that_was_written_is_not_used_again(kind, how, pynative):
    training, net, add, moved = make(kind)
    add()
    add()
    dropped = r"were dropped. The next batch begins a new window"
    with pytest.warns(UserWarning, match=dropped) as caught, pytest.raises(KeyboardInterrupt):
        training.flush() if how == "flush" else add()
    assert len(caught) == 1
    assert int(training.window_position.asnumpy()) == 0
    assert training.flush() is False
    assert as_numpy(net.weight).item() == pytest.approx(moved)
    for _ in range(3):
        add()
    assert as_numpy(net.weight).item() != pytest.approx(moved)
