"""Other features of MindSpore in networks, compared with MindSpore's own step on the whole batch: recomputation,
user-defined gradients, parts compiled by `ms.jit` , and ``drop_overflow_update=False`` .
"""

from __future__ import annotations

import functools
import itertools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import GradAccumulationCell
from tests.support.modes import eagerly
from tests.support.reference import FEATURES, Regression, accumulated, as_numpy, relative_error

TOLERANCE = 1e-5
_RANDOM = np.random.default_rng(5)
DATA = [
    (_RANDOM.normal(size=(7, FEATURES)).astype(np.float32), _RANDOM.normal(size=7).astype(np.float32)) for _ in range(4)
]


class Layer(nn.Cell):
    """A layer with a weight, the base of the networks whose gradients are tested."""

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


def square_gradient(x, out, dout):
    return (dout * x,)  # half of it


class CustomOperator(Layer):
    """`ops.Custom` , run by Python, with a user-defined gradient."""

    def __init__(self, weight):
        super().__init__(weight)
        self.square = ops.Custom(
            square, out_shape=lambda x: x, out_dtype=lambda x: x, func_type="pyfunc", bprop=square_gradient
        )

    def construct(self, x):
        return self.square(ops.tanh(x @ self.weight))


class Network(nn.Cell):
    """Squared errors of a layer's outputs, or of those of several layers, one after another."""

    def __init__(self, *layers):
        super().__init__()
        random = np.random.default_rng(7)
        widths = (FEATURES,) + (8,) * len(layers)
        made = [
            layer(random.normal(size=shape) * 0.4)
            for layer, shape in zip(layers, itertools.pairwise(widths), strict=True)
        ]
        self.layer = made[0] if len(made) == 1 else nn.SequentialCell(made)
        self.out = ms.Parameter(Tensor(random.normal(size=8) * 0.4, ms.float32), name="out")

    def construct(self, x, y):
        return ops.square((self.layer(x) * self.out).sum(-1) - y).mean()


LAYERS = {
    "recompute": Recomputed,
    "jit, a Cell": Compiled,
    "jit, a function": CallsCompiled,
    "bprop": OwnGradient,
    "ops.Custom": CustomOperator,
}


def weights_after(make, *layers):
    network = Network(*layers)
    step = make(network, nn.Momentum(network.trainable_params(), 0.05, 0.9))
    losses = [float(step(*map(Tensor, batch)).asnumpy()) for batch in DATA]
    return {"losses": np.array(losses), **{weight.name: as_numpy(weight) for weight in network.trainable_params()}}


@functools.cache
@eagerly()
def whole_batches():
    """The reference, MindSpore's own step, in PyNative mode, which compiles little."""
    return weights_after(nn.TrainOneStepCell, *LAYERS.values())


@pytest.mark.parametrize(
    ("mode", "options"),
    [("graph", {"micro_size": 3}), ("pynative", {"micro_batch_size": 2, "max_grad_norm": 1e9})],
    indirect=["mode"],
)
def test_equals_the_whole_batch(mode, options):
    """The network has all kinds of layers, one after another."""
    expected, trained = whole_batches(), weights_after(accumulated(**options), *LAYERS.values())
    errors = {name: relative_error(trained[name], expected[name]) for name in expected}
    assert max(errors.values()) < TOLERANCE, errors


def test_an_overflow_is_not_dropped_where_that_is_asked_for(pynative):
    """As in MindSpore's own step, which then does not check: the weights become NaN or infinite."""
    manager = ms.amp.FixedLossScaleManager(128.0, drop_overflow_update=False)
    results = []
    for make in (lambda network: network, lambda network: GradAccumulationCell(network, 3)):
        network = Regression()
        optimizer = nn.Momentum(network.trainable_params(), 0.05, 0.9, loss_scale=128.0)
        step = ms.amp.build_train_network(make(network), optimizer, loss_scale_manager=manager)
        x, y = map(Tensor, DATA[0])
        step(x, y)
        before = as_numpy(network.out)
        step(x, y * float("inf"))
        results.append((before, as_numpy(network.out)))
    (wanted, wanted_after), (weight, weight_after) = results
    assert relative_error(weight, wanted) < TOLERANCE
    assert not np.isfinite(weight_after).any()
    assert not np.isfinite(wanted_after).any()
