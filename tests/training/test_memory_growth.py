"""A process does not grow with the number of batches.

MindSpore's runtime loses memory at each call of graphs of some forms (see the rules at the head of step.py). RSS hides
it for long, because the heap has free space; `mallinfo2` counts what is allocated. A leak of one form loses 0.8 KB and
more for each Parameter that has a gradient, so 16 KB at least here, at a batch, at a window, or at every second one.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import (
    AutoSize,
    GradAccumulator,
    MaxTokens,
    SkipSpikes,
    Transform,
    WeightAverage,
    WithBatchLossCell,
)
from tests.support.modes import MODES
from tests.support.reference import Outer, make_step

LAYERS = 10  # with a weight and a bias each
MOST = 1024  # bytes a batch
WARM_UP, BATCHES = 40, 60  # of each half


class _MallInfo2(ctypes.Structure):
    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


_library = ctypes.CDLL(None)
pytestmark = pytest.mark.skipif(not hasattr(_library, "mallinfo2"), reason="mallinfo2 is glibc's, since 2.33")


def allocated() -> int:
    """Bytes that the process has allocated and not freed."""
    _library.mallinfo2.restype = _MallInfo2
    gc.collect()
    info = _library.mallinfo2()
    return info.uordblks + info.hblkhd


def growth(train: Callable[[], object]) -> float:
    """Bytes a batch, after a warm-up. The lesser of two halves: a leak is in both, a list that doubles in one."""
    for _ in range(WARM_UP):
        train()
    sizes = [allocated()]
    for _ in range(2):
        for _ in range(BATCHES):
            train()
        sizes.append(allocated())
    return min(sizes[1] - sizes[0], sizes[2] - sizes[1]) / BATCHES


class Losses(nn.Cell):
    """A network whose `kind` of loss is computed from all of its layers."""

    def __init__(self, kind: str = "mean") -> None:
        super().__init__()
        self.layers = nn.SequentialCell([nn.Dense(4, 4) for _ in range(LAYERS)])
        self.kind = kind

    def construct(self, x, y):
        outputs = self.layers(x)
        errors = (outputs - y) ** 2
        if self.kind == "ratio":
            return errors.sum(), (y > 0).sum()
        if self.kind == "several":
            return errors.mean(), ops.abs(outputs).mean()
        if self.kind == "aux":
            return errors.mean(), outputs
        return errors.sum() if self.kind == "sum" else errors.mean()


class Tokens(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.SequentialCell([nn.Dense(4, 4) for _ in range(LAYERS)])
        self.embedding = nn.Embedding(8, 4)

    def construct(self, tokens):
        return (self.layers(self.embedding(tokens)) ** 2).mean()


class Spread(nn.Cell):
    """A loss of the whole batch."""

    def construct(self, outputs):
        return ((outputs - outputs.mean(0)) ** 2).mean() + (outputs**2).mean()


class EverySecond(Transform):
    """Allows every second update."""

    def prepare(self, network):
        self.asked = self.state("asked", np.zeros((), np.int32))

    def allows(self, gradients):
        asked = ops.assign_add(self.asked, Tensor(1, ms.int32))
        return ops.depend(self.asked, asked) % 2 == 0


X, Y = Tensor(np.ones((4, 4), np.float32)), Tensor(np.tile(np.float32([1, 0, 1, 1]), (4, 1)))
TOKENS = Tensor(np.array([[1] * length + [0] * (8 - length) for length in (2, 7, 3, 8)], np.int32))


def positive(x, y):
    return (y > 0).sum()


def real_tokens(tokens):
    return (tokens > 0).sum()


def lengths(tokens):
    return (tokens > 0).sum(1)


def by_sample(x, y):
    return [(x[row : row + 1], y[row : row + 1]) for row in range(4)]


def manager():
    return nn.DynamicLossScaleUpdateCell(2.0**10, 2, 1000)


def a_step(kind: str = "mean", scale_sense=None, batches=((X, Y),), optimizer=None, **options) -> Callable[[], object]:
    """Trains a step, on these batches in turn."""
    options.setdefault("micro_size", 4)
    optimizer = optimizer or (lambda weights: nn.Momentum(weights, 1e-3, 0.9))
    step = make_step(Losses(kind), optimizer, scale_sense and scale_sense(), jit=True, **options)
    return in_turn(step, batches)


def in_turn(step, batches) -> Callable[[], object]:
    number = 0

    def train():
        nonlocal number
        number += 1
        return step(*batches[number % len(batches)])

    return train


def overflowing() -> tuple:
    """Every second batch has a micro-batch that overflows."""
    large = np.ones((4, 4), np.float32)
    large[1] = np.inf
    return (X, Y), (Tensor(large), Y)


def uncounted() -> tuple:
    """Every second batch has a micro-batch that counts nothing."""
    some = np.ones((4, 4), np.float32)
    some[2] = 0
    return (X, Y), (X, Tensor(some))


def an_accumulator(accumulation_steps=2, count=None, scaled=False, **options) -> Callable[[], object]:
    """Calls an accumulator with gradients that are given, so that only its own calls are measured."""
    weights = Losses().trainable_params()
    scale_sense = manager() if scaled else None
    accumulator = GradAccumulator(
        nn.Momentum(weights, 1e-3, 0.9), accumulation_steps, scale_sense=scale_sense, **options
    )
    gradients = tuple(Tensor(np.full(weight.shape, 1e-3, np.float32)) for weight in weights)
    loss = Tensor(0.5, ms.float32)

    def train():
        if scaled:
            accumulator.scale(loss)
        accumulator(gradients, count, loss=0.5)

    return train


def of_the_whole_batch():
    network = WithBatchLossCell(nn.SequentialCell([nn.Dense(4, 4) for _ in range(LAYERS)]), Spread())
    return in_turn(make_step(network, micro_size=2, jit=True), ((X,),))


def tokens():
    split = MaxTokens(16, length=lengths, widths=2)
    return in_turn(make_step(Tokens(), split=split, count=real_tokens, jit=True), ((TOKENS,),))


def within_another_graph(**options):
    return in_turn(Outer(make_step(Losses(), micro_size=4, **options)), ((X, Y),))


def two_links():
    return SkipSpikes(norm=1e9), WeightAverage(0.9)


QUICK: dict[str, Callable[[], Callable]] = {
    # One of each: the end of a window in the step's graph, and in its own; a branch before and after a micro-batch
    # runs; a loop's accumulator.
    "windows": lambda: a_step(accumulation_steps=2),
    "scaled-windows": lambda: a_step(scale_sense=manager, accumulation_steps=2),
    "count-drop": lambda: a_step(count=positive, overflow="drop_micro_batch", batches=overflowing()),
    "accumulator": an_accumulator,
}

THOROUGH: dict[str, Callable[[], Callable]] = {
    "one-batch": lambda: a_step(record_noise=True, max_grad_norm=1.0),
    "windows-of-4": lambda: a_step(accumulation_steps=4, record_noise=True, max_grad_norm=1.0, micro_size=3),
    "adam": lambda: a_step(accumulation_steps=2, optimizer=lambda weights: nn.Adam(weights, 1e-3)),
    "count": lambda: a_step(count=positive, batches=uncounted(), micro_size=3),
    "count-windows": lambda: a_step(count=positive, accumulation_steps=2, min_count=1.0, batches=uncounted()),
    "count-noise": lambda: a_step(count=positive, record_noise=True, micro_size=3, accumulation_steps=2),
    "drop": lambda: a_step(overflow="drop_micro_batch", batches=overflowing()),
    "drop-windows": lambda: a_step(overflow="drop_micro_batch", accumulation_steps=2, batches=overflowing()),
    "ratio": lambda: a_step("ratio", reduction="ratio", micro_size=3),
    "sum-drop": lambda: a_step("sum", reduction="sum", count=positive, overflow="drop_micro_batch"),
    "several": lambda: a_step("several", loss_weights=(1.0, 0.5)),
    "several-counts": lambda: a_step(
        "several", loss_weights=(1.0, 0.5), count=(positive, positive), batches=uncounted()
    ),
    "aux": lambda: a_step("aux", aux=True, count=positive, record_noise=True, micro_size=3),
    "aux-windows": lambda: a_step("aux", aux=True, accumulation_steps=2),
    "scale": lambda: a_step(scale_sense=manager, batches=overflowing()),
    "vetoes": lambda: a_step(transforms=(SkipSpikes(norm=1e-9),)),
    "some-vetoes": lambda: a_step(transforms=(EverySecond(),), scale_sense=manager, batches=overflowing()),
    "links-windows": lambda: a_step(transforms=two_links(), accumulation_steps=2),
    "split": lambda: a_step(split=by_sample, micro_size=None),
    "split-count": lambda: a_step(split=by_sample, micro_size=None, count=positive, accumulation_steps=2),
    "tokens": tokens,
    "auto": lambda: a_step(micro_size=None, micro_batch_size=AutoSize(memory_limit=1 << 36)),
    "of-batch": of_the_whole_batch,
    "inside": lambda: within_another_graph(accumulation_steps=2),
    "accumulator-count": lambda: an_accumulator(count=3.0, min_count=1.0, max_grad_norm=1.0),
    "accumulator-sum-drop": lambda: an_accumulator(4, 3.0, True, reduction="sum", overflow="drop_micro_batch"),
    "accumulator-links": lambda: an_accumulator(transforms=two_links()),
}


@pytest.mark.core(mode="graph", way=tuple(QUICK))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", {**QUICK, **THOROUGH})
def test_memory_is_flat(way, mode):
    """In PyNative mode with ``jit=True`` , which a loop's accumulator has by itself."""
    if mode == "pynative" and way == "inside":
        pytest.skip("no graph contains the step")
    ms.set_context(mode=MODES[mode])
    assert growth({**QUICK, **THOROUGH}[way]()) < MOST
