"""A process does not grow with the number of batches.

MindSpore's runtime loses memory at each call of graphs of some forms (see the rules at the head of step.py). RSS hides
it for long, because the heap has free space; `mallinfo2` counts what is allocated. A leak of one form loses 0.8 KB and
more for each Parameter that has a gradient, so 5 KB here, at each batch, or at some.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
from collections.abc import Callable

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import AutoSize, GradAccumulator, MaxTokens, SkipSpikes, WeightAverage, WithBatchLossCell
from tests.support.reference import Outer, make_step

LAYERS = 3  # with a weight and a bias each
MOST = 1024  # bytes a batch
WARM_UP, BATCHES = 8, 16  # of each half
MARKS = WARM_UP, WARM_UP + BATCHES, WARM_UP + 2 * BATCHES  # the batches after which memory is measured


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
    sizes = []
    for batch in range(1, MARKS[-1] + 1):
        train()
        if batch in MARKS:
            sizes.append(allocated())
    return min(later - earlier for earlier, later in itertools.pairwise(sizes)) / BATCHES


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
        return errors.mean()


class Tokens(Losses):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)

    def construct(self, tokens):
        return (self.layers(self.embedding(tokens)) ** 2).mean()


class Spread(nn.Cell):
    """A loss of the whole batch."""

    def construct(self, outputs):
        return ((outputs - outputs.mean(0)) ** 2).mean() + (outputs**2).mean()


X, Y = Tensor(np.ones((4, 4), np.float32)), Tensor(np.tile(np.float32([1, 0, 1, 1]), (4, 1)))
TOKENS = Tensor(np.array([[1] * length + [0] * (8 - length) for length in (2, 7, 3, 8)], np.int32))


def positive(x, y):
    return (y > 0).sum()


def real_tokens(tokens):
    return (tokens > 0).sum()


def lengths(tokens):
    return (tokens.asnumpy() > 0).sum(1)  # MindSpore's own `sum` loses 0.7 KB


def by_sample(x, y):
    return [(x[row : row + 1], y[row : row + 1]) for row in range(4)]


def manager():
    return nn.DynamicLossScaleUpdateCell(2.0**10, 2, 1000)


def a_step(
    kind: str = "mean", scale_sense=None, batches=((X, Y),), optimizer=nn.Momentum, micro_size=4, **options
) -> Callable[[], object]:
    """Trains a step, on these batches in turn."""
    step = make_step(
        Losses(kind), lambda weights: optimizer(weights, 1e-3, 0.9), scale_sense and scale_sense(),
        micro_size=micro_size, jit=True, **options,
    )  # fmt: skip
    return in_turn(step, *batches)


def in_turn(step, *batches) -> Callable[[], object]:
    turns = itertools.cycle(batches)
    return lambda: step(*next(turns))


OVERFLOWING, UNCOUNTED = (np.ones((4, 4), np.float32) for _ in range(2))
OVERFLOWING[1], UNCOUNTED[2] = np.inf, 0  # of one micro-batch


def an_accumulator() -> Callable[[], object]:
    """Calls an accumulator with gradients that are given, so that only its own calls are measured."""
    optimizer = nn.Momentum(Losses().trainable_params(), 1e-3, 0.9)
    accumulator = GradAccumulator(optimizer, 4, scale_sense=manager(), reduction="sum", overflow="drop_micro_batch")
    gradients = tuple(Tensor(np.full(weight.shape, 1e-3, np.float32)) for weight in optimizer.parameters)
    loss = Tensor(0.5, ms.float32)

    def train():
        accumulator.scale(loss)
        accumulator(gradients, 3.0, loss=0.5)

    return train


def tokens():
    split = MaxTokens(16, length=lengths, widths=2)
    return in_turn(make_step(Tokens(), split=split, count=real_tokens, jit=True, check=None), (TOKENS,))


def accumulated(in_jit: bool = False) -> Callable[[], object]:
    """A loop of the user's, whose function of loss and gradients is the accumulator's, or MindSpore's in a graph."""
    network = Losses().set_train()
    optimizer = nn.Momentum(network.trainable_params(), 1e-3, 0.9)
    accumulator = GradAccumulator(optimizer, 4)
    if in_jit:
        gradients_of = ms.jit(ms.value_and_grad(network, None, optimizer.parameters))
    else:
        gradients_of = accumulator.value_and_grad(network)

    def train():
        loss, gradients = gradients_of(X, Y)
        accumulator(gradients, loss=loss)

    return train


def of_the_whole_batch():
    network = WithBatchLossCell(nn.SequentialCell([nn.Dense(4, 4) for _ in range(LAYERS)]), Spread())
    return in_turn(make_step(network, micro_size=2, jit=True), (X,))


def within_another_graph():
    return in_turn(Outer(make_step(Losses(), micro_size=4, accumulation_steps=2)), (X, Y))


# Each kind of ledger, each way to train once, and each branch of a graph that some calls skip.
IN_GRAPH_MODE: dict[str, Callable[[], Callable]] = {
    "windows": lambda: a_step(scale_sense=manager, accumulation_steps=4),
    "one-batch": lambda: a_step(record_noise=True, max_grad_norm=1.0, optimizer=nn.Adam),
    "count": lambda: a_step(count=positive, overflow="drop_micro_batch", batches=((X, Y), (Tensor(OVERFLOWING), Y))),
    "count-windows": lambda: a_step(
        count=positive,
        record_noise=True,
        micro_size=3,
        accumulation_steps=2,
        min_count=1.0,
        batches=((X, Y), (X, Tensor(UNCOUNTED))),
        check=None,  # these losses are not the means that `positive` says
    ),
    "ratio": lambda: a_step("ratio", reduction="ratio", micro_size=3),
    # Without overflows: from each batch that overflows to one that does not, MindSpore keeps some 1.2 KB for each link.
    "several": lambda: a_step(
        "several", loss_weights=(1.0, 0.5), transforms=(SkipSpikes(norm=1e9), WeightAverage(0.9)), scale_sense=manager
    ),
    "auto": lambda: a_step(micro_size=None, micro_batch_size=AutoSize(memory_limit=1 << 36)),
    "tokens": tokens,
    "of-batch": of_the_whole_batch,
    "inside": within_another_graph,
    "accumulator": accumulated,
    "accumulator-drop": an_accumulator,
}

IN_PYNATIVE_MODE: dict[str, Callable[[], Callable]] = {
    "split": lambda: a_step(split=by_sample, micro_size=None, count=positive, accumulation_steps=2),
    "accumulator-after-jit": lambda: accumulated(in_jit=True),
}
WAYS = IN_GRAPH_MODE | IN_PYNATIVE_MODE


@pytest.mark.parametrize("way", WAYS)
def test_memory_is_flat(way):
    ms.set_context(mode=ms.PYNATIVE_MODE if way in IN_PYNATIVE_MODE else ms.GRAPH_MODE)
    assert growth(WAYS[way]()) < MOST
