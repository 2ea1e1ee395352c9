"""Finding convolutions in a network: MindSpore's layers, operators and functions, at any place."""

from __future__ import annotations

import mindspore
import mindspore as ms
import pytest
from mindspore import mint, nn, ops
from mindspore.ops import conv2d as by_another_name

from gaccum_ms import WithBatchLossCell
from gaccum_ms.cpu import convolutions
from gaccum_ms.cpu.convolutions import convolves


def helper(x):
    return deeper(x)


def deeper(x):
    return mindspore.ops.conv2d(x, x)


@ms.jit
def compiled(x):
    return ops.conv_transpose2d(x, x)


class Calls(nn.Cell):
    def construct(self, x):
        return ops.conv2d(x, x)


class CallsAnAlias(nn.Cell):
    def construct(self, x):
        return by_another_name(x, x)


class CallsAHelper(nn.Cell):
    def construct(self, x):
        return helper(x)


class CallsACompiledFunction(nn.Cell):
    def construct(self, x):
        return compiled(x)


class CallsItsMethod(nn.Cell):
    def construct(self, x):
        return self.convolved(x)

    def convolved(self, x):
        return mint.nn.functional.conv2d(x, x)


class InheritsItsMethod(CallsItsMethod):
    def construct(self, x):
        return self.convolved(x) + 1


class MakesThePrimitive(nn.Cell):
    def construct(self, x):
        return ops.Conv2D(3, 3)(x, x)


class CallsAFunction(nn.Cell):
    def __init__(self):
        super().__init__()
        self.kernel = ms.Parameter(ops.ones((2, 2, 1, 1)))

    def construct(self, x):
        return ops.conv2d(x, self.kernel)


class Holds(nn.Cell):
    """Holds an object in an attribute."""

    def __init__(self, held):
        super().__init__()
        self.held = held

    def construct(self, x):
        return x


class OfItsOwnLayer(nn.Conv2d):
    def construct(self, x):
        return super().construct(x) * 2


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
    "Conv1d": lambda: nn.Conv1d(2, 2, 1),
    "Conv2d": lambda: nn.Conv2d(2, 2, 1),
    "Conv3d": lambda: nn.Conv3d(2, 2, 1),
    "Conv1dTranspose": lambda: nn.Conv1dTranspose(2, 2, 1),
    "Conv2dTranspose": lambda: nn.Conv2dTranspose(2, 2, 1),
    "Conv3dTranspose": lambda: nn.Conv3dTranspose(2, 2, 1),
    "Conv2dBnAct": lambda: nn.Conv2dBnAct(2, 2, 1),
    "mint Conv1d": lambda: mint.nn.Conv1d(2, 2, 1),
    "mint Conv2d": lambda: mint.nn.Conv2d(2, 2, 1),
    "mint Conv3d": lambda: mint.nn.Conv3d(2, 2, 1),
    "mint ConvTranspose2d": lambda: mint.nn.ConvTranspose2d(2, 2, 1),
    "a layer of one's own": lambda: OfItsOwnLayer(2, 2, 1),
    "nested": lambda: nn.SequentialCell(nn.Dense(2, 2), nn.CellList([nn.SequentialCell(nn.Conv2d(2, 2, 1))])),
    "primitive": lambda: Holds(ops.Conv2D(2, 1)),
    "primitive in a tuple": lambda: Holds((1, [ops.Conv3D(2, 1)])),
    "primitive in a dict": lambda: Holds({"one": ops.Conv2DTranspose(2, 1)}),
    "cell in a tuple": lambda: Holds((nn.Conv2d(2, 2, 1),)),
    "function": lambda: Holds(ops.conv3d),
    "function with a kernel": CallsAFunction,
    "call": Calls,
    "call by another name": CallsAnAlias,
    "call through functions": CallsAHelper,
    "call of a compiled function": CallsACompiledFunction,
    "call in a method": CallsItsMethod,
    "call in an inherited method": InheritsItsMethod,
    "primitive made in construct": MakesThePrimitive,
    "under a loss": lambda: nn.WithLossCell(nn.SequentialCell(nn.Conv2d(2, 2, 1)), nn.MSELoss()),
    "under a loss of the batch": lambda: WithBatchLossCell(nn.Conv2d(2, 2, 1), nn.MSELoss()),
}
OTHERS = {
    "Dense": lambda: nn.Dense(2, 2),
    "names alone": Looks,
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8),
    "recurrent": lambda: nn.LSTM(2, 2),
    "pooling": lambda: nn.SequentialCell(nn.MaxPool2d(2), nn.BatchNorm2d(2), nn.Embedding(2, 2)),
    "under a loss": lambda: nn.WithLossCell(nn.Dense(2, 2), nn.CrossEntropyLoss()),
}


@pytest.mark.parametrize("network", CONVOLVE)
def test_a_convolution_is_found_wherever_it_is(network):
    assert convolves(CONVOLVE[network]())


@pytest.mark.parametrize("network", OTHERS)
def test_what_does_not_convolve_is_not_taken_for_it(network):
    assert not convolves(OTHERS[network]())


@pytest.mark.core("mobilenet_v2_035_128")
@pytest.mark.parametrize("name", ["mobilenet_v2_035_128", "resnet18"])
def test_mindcvs_networks_convolve(name):
    mindcv = pytest.importorskip("mindcv", reason="mindcv is in the extra 'test'", exc_type=ImportError)
    assert convolves(mindcv.create_model(name))


def test_a_network_that_holds_itself_comes_to_an_end():
    around = [nn.Dense(2, 2)]
    around.append(around)
    assert not convolves(Holds(around))


def test_an_accumulator_knows_convolutions_by_their_weights(monkeypatch):
    limits = []
    monkeypatch.setattr(convolutions, "limit_instructions", lambda: limits.append(1))
    convolutions.limit_instructions_for_weights(nn.Dense(2, 2).trainable_params())
    assert limits == []
    convolutions.limit_instructions_for_weights(nn.Conv2d(2, 2, 3).trainable_params())
    assert limits == [1]
