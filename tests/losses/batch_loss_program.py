"""Trainings of a WithBatchLossCell that test_batch_loss.py runs in a new process each, in graph mode."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from benchmarks.memory_limit import bytes_in
from gaccum_ms import WithBatchLossCell
from tests.support.contrastive import InfoNCE, Spread, accumulated, unit_length, whole
from tests.support.modes import eagerly
from tests.support.reference import make_step, relative_error, vector

WIDTH = 2**16  # the width of the activations, of which each has 64 MB for 256 samples


class WideTower(nn.Cell):
    """Large activations, few weights."""

    def __init__(self) -> None:
        super().__init__()
        scales = np.random.default_rng(0).normal(size=(4, WIDTH))
        self.scales = ms.ParameterTuple(
            [ms.Parameter(Tensor(scale, ms.float32), name=f"scale{i}") for i, scale in enumerate(scales)]
        )

    def construct(self, x):
        values = ops.tile(x, (1, WIDTH // x.shape[1]))
        for scale in self.scales:
            values = ops.tanh(values * scale)
        return unit_length(values.reshape((x.shape[0], 64, -1)).mean(axis=-1))


class WideTowers(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = WideTower(), nn.Dense(64, 64)

    def construct(self, x, y):
        return self.one(x), unit_length(self.other(y))


class Residual(nn.Cell):
    """Adds in place, as many networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Dense(4, 4)
        self.out = nn.Dense(12, 6)

    def construct(self, x):
        x = x.reshape((-1, 3, 4))
        x += self.inner(x)
        return self.out(x.reshape((-1, 12)))


class AddedInPlace(nn.Cell):
    """Where a Tensor is indexed after this, MindSpore's compiler keeps functions that it otherwise folds away."""

    def construct(self, x):
        y = x * 2
        y += x
        return y[0]


def update_residual(samples: int) -> float:
    """The relative error of an update."""
    ms.set_context(mode=ms.GRAPH_MODE)
    AddedInPlace()(Tensor(np.ones((2, 2), np.float32)))
    x = Tensor(np.random.default_rng(0).normal(size=(samples, 12)).astype(np.float32))
    ours, plain = Residual(), Residual()
    ms.load_param_into_net(plain, {one.name: one.clone() for one in ours.get_parameters()})
    before = vector(plain.trainable_params())
    accumulated(micro_size=3)(ours, Spread(), nn.SGD(ours.trainable_params(), 1.0)).set_train()(x)
    with eagerly():
        whole(plain, Spread(), nn.SGD(plain.trainable_params(), 1.0)).set_train()(x)
    return relative_error(*(vector(one.trainable_params()) - before for one in (ours, plain)))


def growth(micro_size: int, samples: int) -> float:
    """By how many MB two updates raise the process's peak."""
    ms.set_context(mode=ms.GRAPH_MODE)
    step = make_step(WithBatchLossCell(WideTowers(), InfoNCE()), micro_size=micro_size)
    random = np.random.default_rng(1)
    batch = [Tensor(random.normal(size=(samples, 64)).astype(np.float32)) for _ in range(2)]
    before = bytes_in("/proc/self/status", "VmHWM")
    for _ in range(2):
        step(*batch).asnumpy()
    return (bytes_in("/proc/self/status", "VmHWM") - before) / 2**20
