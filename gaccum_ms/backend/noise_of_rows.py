"""Random numbers that each row of a batch keeps, whichever rows it is evaluated with; and no collective.

So a loss that draws noise, such as a variational autoencoder's, has the same value for the same rows, and those of
parts can be compared with that of all. It covers the operators by which `mindspore.ops` draws normal and uniform
numbers and drops values. Their calls are replaced in their classes, in this thread alone, as `mean_of_elements` does.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import mindspore as ms
import numpy as np
from mindspore import ops
from mindspore.ops.operations import comm_ops

# What these modules' functions call.
_FUNCTIONS = ("mindspore.mint.distributed.distributed", "mindspore.communication.comm_func")
_COLLECTIVES = ("inner_comm_", "dist_comm_")


class ReachesOtherRanks(Exception):
    """A collective was about to run."""


class NoiseOfRows:
    """The numbers that are drawn while some rows are evaluated."""

    def __init__(self) -> None:
        self.rows: Sequence[int] | None = None
        # Of each operator that has drawn, which axis has the rows, and the lengths of the others.
        self.drawn: list[tuple[int | None, tuple[int, ...]]] = []

    def begin(self, rows: Sequence[int] | None) -> None:
        """Evaluate these rows, by their numbers; None: let operators draw as they do."""
        self.rows, self.drawn = rows, []

    def numbers(self, draw: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray], shape: Any) -> np.ndarray:
        """Numbers of this shape, each row's by itself. `draw` : how a generator draws some of a shape."""
        rows, number = self.rows or (), len(self.drawn)
        axis = next((axis for axis, length in enumerate(shape) if length == len(rows)), None)
        others = tuple(length for place, length in enumerate(shape) if place != axis)
        self.drawn.append((axis, others))
        if axis is None:
            return draw(np.random.default_rng(number), others)
        return np.stack([draw(np.random.default_rng((number, row)), others) for row in rows], axis)


@contextmanager
def noise_of_rows(refuses_collectives: bool) -> Iterator[NoiseOfRows]:
    """Within it, operators draw so. `refuses_collectives` : a collective raises `ReachesOtherRanks` instead."""
    noise, thread = NoiseOfRows(), threading.get_ident()
    calls: list[tuple[Any, str, Callable[..., Any]]] = [
        (kind, "__call__", _drawing(noise, thread, kind.__call__, draw)) for kind, draw in _DRAWS.items()
    ]
    if refuses_collectives:
        calls += [(owner, name, _refused(thread, getattr(owner, name))) for owner, name in _collectives()]
    with ExitStack() as replaced:
        for owner, name, call in calls:
            replaced.enter_context(mock.patch.object(owner, name, call))
        yield noise


def _drawing(noise: NoiseOfRows, thread: int, original: Any, draw: Callable[..., Any]) -> Callable[..., Any]:
    def call(operator: Any, *inputs: Any) -> Any:
        if noise.rows is not None and threading.get_ident() == thread:
            return draw(noise, operator, *inputs)
        return original(operator, *inputs)

    return call


def _collectives() -> Iterator[tuple[Any, str]]:
    for name, kind in vars(comm_ops).items():
        is_operator = inspect.isclass(kind) and issubclass(kind, ops.Primitive)
        if is_operator and kind.__module__ == comm_ops.__name__ and not name.startswith("_"):
            yield kind, "__call__"
    for module in map(importlib.import_module, _FUNCTIONS):
        yield from ((module, name) for name in vars(module) if name.startswith(_COLLECTIVES))


def _refused(thread: int, original: Any) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        if threading.get_ident() == thread:
            raise ReachesOtherRanks("the loss has a collective")
        return original(*arguments, **named)

    return call


def _normal(noise: NoiseOfRows, operator: Any, shape: Any) -> ms.Tensor:
    return ms.Tensor(noise.numbers(np.random.Generator.standard_normal, _sizes(shape)), ms.float32)


def _uniform(noise: NoiseOfRows, operator: Any, shape: Any) -> ms.Tensor:
    return ms.Tensor(noise.numbers(np.random.Generator.random, _sizes(shape)), ms.float32)


def _integers(noise: NoiseOfRows, operator: Any, shape: Any, low: ms.Tensor, high: ms.Tensor) -> ms.Tensor:
    ends = int(low.asnumpy()), int(high.asnumpy())
    return ms.Tensor(noise.numbers(lambda generator, of: generator.integers(*ends, of), _sizes(shape)), ms.int32)


def _dropout(noise: NoiseOfRows, operator: Any, values: ms.Tensor) -> tuple[ms.Tensor, ms.Tensor]:
    kept = noise.numbers(np.random.Generator.random, values.shape) < operator.keep_prob
    mask = ms.Tensor(kept / operator.keep_prob, values.dtype)
    return values * mask, mask


def _sizes(shape: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in (shape.asnumpy() if isinstance(shape, ms.Tensor) else shape))


_DRAWS: dict[Any, Callable[..., Any]] = {
    ops.StandardNormal: _normal,
    ops.UniformReal: _uniform,
    ops.UniformInt: _integers,
    ops.Dropout: _dropout,
}
