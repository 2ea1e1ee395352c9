"""Forward hooks that a user registers on Cells."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from tests.support.modes import eagerly
from tests.support.reference import make_step

X = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Dense(3, 4), nn.Dense(4, 1)

    def construct(self, x):
        return (self.outer(self.inner(x)) ** 2).mean()


def twice(cell, inputs, outputs):
    return outputs * 2


def halved(cell, inputs):
    return (inputs[0] / 2,)


def trained(place, step_of):
    """The loss, and the weights after a step of ten samples."""
    ms.set_seed(2)
    network = Net()
    network.inner.register_forward_pre_hook(halved) if place else network.register_forward_hook(twice)
    loss = step_of(network)(Tensor(X))
    return [loss.asnumpy(), *(weight.asnumpy() for weight in network.trainable_params())]


@pytest.mark.parametrize("place", ["", "inner"])
def test_a_forward_hook_acts_once_in_each_micro_batch(place):
    """Ten samples are 4 + 4 + 2: MindSpore runs a hook twice, or does not compile, where a graph calls a Cell twice. So
    its own step is right only when run eagerly."""
    with eagerly():
        expected = trained(place, lambda net: nn.TrainOneStepCell(net, nn.SGD(net.trainable_params(), 0.1)).set_train())
    values = trained(place, lambda network: make_step(network, micro_size=3))
    for value, right in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, right, rtol=1e-5, atol=1e-6)
