"""Other features of MindSpore in networks, compared with MindSpore's own step on the whole batch: recomputation,
user-defined gradients, and parts compiled by `ms.jit` ."""

from __future__ import annotations

import functools
import itertools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from tests.support.modes import eagerly
from tests.support.reference import FEATURES, accumulated, as_numpy, batches, relative_error


class Layer(nn.Cell):
    """A layer with a weight, the base of the layers that are tested."""

    def __init__(self, weight):
        super().__init__()
        self.weight = ms.Parameter(Tensor(weight, ms.float32), name="weight")

    def construct(self, x):
        return ops.tanh(x @ self.weight)


class Recomputed(Layer):
    def __init__(self, weight):
        super().__init__(weight)
        self.recompute()


class Compiled(Layer):
    @ms.jit
    def construct(self, x):
        return ops.tanh(x @ self.weight)


@ms.jit
def compiled_tanh(x):
    return ops.tanh(x)


class CallsCompiled(Layer):
    def construct(self, x):
        return compiled_tanh(x @ self.weight)


class HalvedGradient(nn.Cell):
    """The identity with a halved gradient: wrong on purpose, so that a test can check that it is used."""

    def construct(self, x):
        return x * 1.0

    def bprop(self, x, out, dout):
        return (dout * 0.5,)


class OwnGradient(Layer):
    def __init__(self, weight):
        super().__init__(weight)
        self.halved = HalvedGradient()

    def construct(self, x):
        return self.halved(ops.tanh(x @ self.weight))


def square(x):
    return x * x


def half_the_gradient_of_square(x, out, dout):
    return (dout * x,)


class CustomOperator(Layer):
    """`ops.Custom` , run by Python, with a user-defined gradient."""

    def __init__(self, weight):
        super().__init__(weight)
        alike = {"out_shape": lambda x: x, "out_dtype": lambda x: x}
        self.square = ops.Custom(square, func_type="pyfunc", bprop=half_the_gradient_of_square, **alike)

    def construct(self, x):
        return self.square(ops.tanh(x @ self.weight))


class Network(nn.Cell):
    """Squared errors of layers of all kinds, one after another."""

    def __init__(self):
        super().__init__()
        random = np.random.default_rng(7)
        kinds = (Recomputed, Compiled, CallsCompiled, OwnGradient, CustomOperator)
        shapes = itertools.pairwise((FEATURES,) + (8,) * len(kinds))
        layers = [kind(random.normal(size=shape) * 0.4) for kind, shape in zip(kinds, shapes, strict=True)]
        self.layers = nn.SequentialCell(layers)
        self.out = ms.Parameter(Tensor(random.normal(size=8) * 0.4, ms.float32), name="out")

    def construct(self, x, y):
        return ops.square((self.layers(x) * self.out).sum(-1) - y).mean()


def weights_after(make):
    network = Network()
    step = make(network, nn.Momentum(network.trainable_params(), 0.05, 0.9))
    losses = [float(step(Tensor(x), Tensor(y, ms.float32)).asnumpy()) for x, y in batches(7, 4)]
    return {"losses": np.array(losses), **{weight.name: as_numpy(weight) for weight in network.trainable_params()}}


@functools.cache
@eagerly()
def whole_batches():
    """The reference, MindSpore's own step, in PyNative mode, which compiles little."""
    return weights_after(nn.TrainOneStepCell)


@pytest.mark.parametrize(
    ("mode", "options"),
    [("graph", {"micro_size": 3}), ("pynative", {"micro_batch_size": 2, "max_grad_norm": 1e9})],
    indirect=["mode"],
)
def test_equals_the_whole_batch(mode, options):
    expected, trained = whole_batches(), weights_after(accumulated(**options))
    errors = {name: relative_error(trained[name], expected[name]) for name in expected}
    assert max(errors.values()) < 1e-5, errors
