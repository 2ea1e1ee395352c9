"""Finding convolutions in a network: MindSpore's layers, operators and functions, at any place."""

from __future__ import annotations

import mindspore as ms
import pytest
from mindspore import mint, nn, ops
from mindspore.ops import conv2d as by_another_name

from gaccum_ms import WithBatchLossCell
from gaccum_ms.cpu import convolutions
from gaccum_ms.cpu.convolutions import convolves
from tests.support.reference import make_step


def deeper(x):
    return by_another_name(x, x)


@ms.jit
def compiled(x):
    return deeper(x)


class CallsItsMethod(nn.Cell):
    def convolved(self, x):
        return compiled(x)


class InheritsItsMethod(CallsItsMethod):
    def construct(self, x):
        return self.convolved(x) + 1


class Holds(nn.Cell):
    """Holds an object in an attribute."""

    def __init__(self, held):
        super().__init__()
        self.held = held

    def construct(self, x):
        return x


class Looks(nn.Cell):
    """Has names that look like convolutions, but no convolution."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Dense(2, 2)
        self.cast = ops.Cast()
        self.convertible = (ops.ReLU(), {"conv2d": 3}, nn.SequentialCell(nn.Dense(2, 2), nn.LayerNorm((2,))))

    def convert(self, x):
        return ops.cast(x, ms.float16)

    def construct(self, x):
        return conv2d_without_one(self.conv1(self.convert(x)))


def conv2d_without_one(x):
    return ops.matmul(x, x)


CONVOLVE = {
    "layer": lambda: nn.Conv3dTranspose(2, 2, 1),
    "layer of mint": lambda: mint.nn.Conv2d(2, 2, 1),
    "nested": lambda: nn.SequentialCell(nn.Dense(2, 2), nn.CellList([nn.SequentialCell(nn.Conv2d(2, 2, 1))])),
    "primitive in a dict": lambda: Holds({"one": ops.Conv2DTranspose(2, 1)}),
    "cell in a list": lambda: Holds([Holds(ops.Conv2D(2, 1))]),
    "function": lambda: Holds(ops.conv3d),
    "call by another name, through functions, one of them compiled, and an inherited method": InheritsItsMethod,
    "under a loss of the batch": lambda: WithBatchLossCell(nn.Conv2d(2, 2, 1), nn.MSELoss()),
}
OTHERS = {
    "names alone": Looks,
    "transformer": lambda: nn.SequentialCell(nn.Embedding(2, 4), nn.TransformerEncoderLayer(4, 2, 8)),
    "pooling": lambda: nn.SequentialCell(nn.MaxPool2d(2), nn.BatchNorm2d(2)),
}


@pytest.mark.parametrize("network", [*CONVOLVE, *OTHERS])
def test_a_convolution_is_found_wherever_it_is_and_no_other_is_taken_for_it(network):
    assert convolves((CONVOLVE | OTHERS)[network]()) == (network in CONVOLVE)


def test_a_network_that_holds_itself_comes_to_an_end():
    around = [nn.Dense(2, 2)]
    around.append(around)
    assert not convolves(Holds(around))


def test_steps_know_convolutions_by_their_network_and_accumulators_by_their_weights(monkeypatch):
    """What does not convolve keeps all instructions."""
    limits = []
    monkeypatch.setattr(convolutions, "limit_instructions", lambda: limits.append(1))
    for layer, expected in (nn.Dense(2, 2), []), (nn.Conv2d(2, 2, 3), [1, 1]):
        make_step(nn.WithLossCell(layer, nn.MSELoss()), micro_size=2)
        convolutions.limit_instructions_for_weights(layer.trainable_params())
        assert limits == expected
