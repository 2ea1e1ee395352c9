"""An eager gradient that an error interrupts has no effect on later operations: the next batch's update is that of a
training that never had the bad batch."""

from __future__ import annotations

import functools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from tests.support.reference import Regression, as_numpy, batches, make_step
from tests.support.state import assert_identical, everything

DATA = batches(6, 4, seed=11)


class FailingBackward(nn.Cell):
    def __init__(self, raise_once):
        super().__init__()
        self.raise_once = raise_once

    def construct(self, loss):
        return loss * 1.0

    def bprop(self, loss, out, dout):
        self.raise_once("backward")
        return (dout * 1.0,)


class FailingLoss(nn.Cell):
    def __init__(self, raise_once):
        super().__init__()
        self.network = Regression()
        self.backward, self.raise_once = FailingBackward(raise_once), raise_once

    def construct(self, x, y):
        loss = self.network(x, y)
        self.raise_once("forward")
        return self.backward(loss)


class FailingOptimizer(nn.AdamWeightDecay):
    def construct(self, gradients):
        self.raise_once("optimizer")
        return super().construct(gradients)


@functools.cache
def everywhere(place, error):
    """Windows of two batches; before the second and the third, one that fails at this place and is dropped. The losses,
    and everything that the step then has. The cell has a count, a transform and a split."""
    ready = []

    def raise_once(here):
        if here == place and ready:
            raise ready.pop()

    def count(x, y):
        raise_once("count")
        return Tensor(float(x.shape[0]), ms.float32)

    def split(x, y):
        raise_once("split")
        return [(x[:3], y[:3]), (x[3:], y[3:])]

    def transform(gradients):
        raise_once("transform")
        return gradients

    network = FailingLoss(raise_once)
    optimizer = FailingOptimizer(network.trainable_params(), 0.01)
    optimizer.raise_once = raise_once
    options = {"split": split, "count": count, "transforms": (transform,), "accumulation_steps": 2}
    step = make_step(network, lambda _: optimizer, **options)
    losses = []
    for number, batch in enumerate(DATA):
        if error is not None and number in (2, 4):
            ready.append(error("once"))
            with pytest.raises(error):
                for bad in DATA[:2]:
                    step(*map(Tensor, bad))
            assert not ready
            assert float(Tensor(np.array([3.0, 4.0], np.float32))[1]) == 4.0
        losses.append(as_numpy(step(*map(Tensor, batch))))
    return everything(step) | {"losses": np.array(losses)}


@pytest.mark.filterwarnings("ignore:.*a batch failed half-way")
@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("forward", KeyboardInterrupt),
        ("backward", ValueError),
        ("count", ValueError),
        ("split", KeyboardInterrupt),
        ("transform", ValueError),
        ("optimizer", KeyboardInterrupt),
    ],
)
def test_the_next_update_wherever_the_error_comes_from(place, error, pynative):
    but = {"gaccum_ms.random_state", "gaccum_ms.batch_count"}
    assert_identical(everywhere(place, error), everywhere(None, None), but)
