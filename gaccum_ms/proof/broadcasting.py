"""Finds an input that is broadcast: labels of shape (N,) beside outputs of shape (N, 1) become (N, N), so that the loss
compares each sample with the labels of all.

The loss then does not change if the input's entries change places; in another shape it does, and micro-batches have
the whole batch's loss.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from gaccum_ms.options.options import Options

_Inputs = Sequence[ms.Tensor]


def broadcast_input(
    options: Options,
    function: Callable[..., Any],
    batch: _Inputs,
    micro_batches: Sequence[_Inputs],
    loss_of: Callable[[_Inputs], float],
    tolerance: float,
) -> str | None:
    """The input that is broadcast, and the shape that it needs, in words; None if there is none. `loss_of` : the
    network's loss on a micro-batch."""
    if options.axis != 0 or options.several_losses:
        return None
    equal = functools.partial(math.isclose, rel_tol=tolerance)
    whole = loss_of(batch)
    for position in range(1, len(batch)):
        if position in options.shared or not equal(loss_of(_moved(batch, position)), whole):
            continue
        for shape in _other_shapes(batch[position].shape, _is_elementwise(function)):
            try:
                paired = loss_of(_reshaped(batch, position, shape))
                moved = loss_of(_reshaped(_moved(batch, position), position, shape))
                losses = [loss_of(_reshaped(micro_batch, position, shape)) for micro_batch in micro_batches]
            except Exception:  # the network cannot run so, in one of MindSpore's many ways
                continue
            sizes = [len(micro_batch[position]) for micro_batch in micro_batches]
            totals = (float(np.average(losses, weights=sizes)), float(np.sum(losses)))
            if not equal(paired, whole) and not equal(moved, paired) and any(equal(total, paired) for total in totals):
                return _described(position, batch[position].shape, shape, _is_elementwise(function))
    return None


def _described(position: int, shape: tuple[int, ...], other: tuple[int, ...], certain: bool) -> str:
    text = (
        f"input {position} of shape {shape} is broadcast against what the network makes of the others: each sample is "
        f"compared with the entries of all samples, also without accumulation. Give it the shape {other}, so that each "
        f"sample is compared with its own"
    )
    return text if certain else f"{text}; or, if its entries are not those of samples, name it in 'shared' of EvenSplit"


def _is_elementwise(network: Any) -> bool:
    """Whether the loss is one of MindSpore's, which compare outputs and labels entry by entry, or refuse them."""
    return isinstance(network, nn.WithLossCell) and type(network._loss_fn).__module__.startswith("mindspore.")


def _other_shapes(shape: tuple[int, ...], elementwise: bool) -> Iterator[tuple[int, ...]]:
    """Shapes of the same entries, with an axis of length 1 more or less."""
    samples, *rest = shape
    if rest and not elementwise and rest != [1]:
        return  # it may be what a loss of the user's wants, such as one of all pairs
    yield from ((samples, *rest[:axis], *rest[axis + 1 :]) for axis, length in enumerate(rest) if length == 1)
    if rest and elementwise:
        yield (samples, 1, *rest)
    if not rest or elementwise:
        yield (*shape, 1)


def _moved(inputs: _Inputs, position: int) -> list[ms.Tensor]:
    """The inputs, with the samples of one in other places."""
    value = inputs[position]
    return [*inputs[:position], ops.concat((value[1:], value[:1])), *inputs[position + 1 :]]


def _reshaped(inputs: _Inputs, position: int, shape: tuple[int, ...]) -> list[ms.Tensor]:
    value = inputs[position]
    return [*inputs[:position], value.reshape((value.shape[0], *shape[1:])), *inputs[position + 1 :]]
