"""Hooks that a user registers on Cells and weights."""

from __future__ import annotations

import warnings

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from gaccum_ms import WithBatchLossCell
from tests.support.reference import Regression, make_step

X = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.inner = nn.Dense(3, 4)
        self.outer = nn.Dense(4, 1)

    def construct(self, x):
        return (self.outer(self.inner(x)) ** 2).mean()


class MeanSquare(nn.Cell):
    def construct(self, outputs):
        return (outputs**2).mean()


def twice(cell, inputs, outputs):
    return outputs * 2


def halved(cell, inputs):
    return (inputs[0] / 2,)


def clipped(gradient):
    return gradient.clip(-1, 1)


def trained(place, kind, step_of):
    """The loss, and the weights after a step of ten samples."""
    ms.set_seed(2)
    network = Net()
    cell = getattr(network, place) if place else network
    cell.register_forward_hook(twice) if kind == "forward" else cell.register_forward_pre_hook(halved)
    loss = step_of(network)(Tensor(X))
    return [loss.asnumpy(), *(weight.asnumpy() for weight in network.trainable_params())]


def whole(network):
    return nn.TrainOneStepCell(network, nn.SGD(network.trainable_params(), 0.1)).set_train()


@pytest.mark.core("graph-inner-forward", "graph--forward")
@pytest.mark.parametrize("kind", ["forward", "before forward"])
@pytest.mark.parametrize("place", ["", "inner"])
@pytest.mark.parametrize("mode", ["graph", "pynative, jit"])
def test_a_forward_hook_acts_once_in_each_micro_batch(mode, place, kind):
    """Ten samples are 4 + 4 + 2: MindSpore runs a hook twice, or does not compile, where a graph calls a Cell twice. So
    its own step is right only when run eagerly."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    expected = trained(place, kind, whole)
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    values = trained(place, kind, lambda network: make_step(network, micro_size=3, jit=True))
    for value, right in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, right, rtol=1e-5, atol=1e-6)


def told(step, *batch):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(*map(Tensor, batch))
    return [str(one.message) for one in caught]


def test_a_hook_of_a_weight_is_told_to_see_micro_batches(pynative):
    for micro_size, number in ((1, 0), (2, 1)):
        network = Regression()
        network.hidden.register_hook(clipped)
        texts = told(make_step(network, micro_size=micro_size), np.ones((4, 12), np.float32), np.ones(4, np.float32))
        assert len(texts) == number
        assert all("1 weight(s) have hooks (hidden), which get each micro-batch's part" in text for text in texts)


def test_forward_hooks_in_a_compiled_loss_of_the_batch_are_told(pynative):
    for jit, number in ((False, 0), (True, 1)):
        backbone = nn.Dense(3, 1)
        backbone.register_forward_hook(twice)
        texts = told(make_step(WithBatchLossCell(backbone, MeanSquare()), micro_size=2, jit=jit), X)
        assert len(texts) == number
        assert all(
            "1 Cell(s) with forward hooks (backbone), which MindSpore runs too often where" in text for text in texts
        )
