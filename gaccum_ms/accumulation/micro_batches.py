"""A batch and its micro-batches: where the boundaries are, and how a compiled loop takes one slice.

All inputs of a batch are cut along axis 0 at the same boundaries, except those that `EvenSplit` shares. All
micro-batches have ``ceil(N / micro_size)`` samples, so that one compiled loop body runs them all; the remaining samples
are one smaller micro-batch at the end. Ten samples in four micro-batches are 3 + 3 + 3 + 1, nine in four are 3 + 3 + 3:
there are never more micro-batches than requested, and never a larger one.

Where `set_inputs` leaves the length of axis 0 open, the graph computes the boundaries as Tensors, and the smaller
micro-batch is the loop's last turn. The boundaries are the same, and one graph runs batches of all lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import ops

from gaccum_ms.backend.checks import described
from gaccum_ms.losses.counts import samples_of


class SplitPlan(NamedTuple):
    """How one batch is cut: ``full`` micro-batches of ``size`` samples, then one of ``rest`` samples if not 0."""

    samples: int
    size: int
    full: int
    rest: int


def batch_shapes(inputs: tuple[Any, ...]) -> list[tuple[int, ...]]:
    """The shapes of a batch's inputs; a TypeError for an input that cannot be split."""
    for position, value in enumerate(inputs):
        if _is_text(value):
            raise TypeError(
                f"For 'GradAccumulationCell', every input must be a Tensor of numbers, but input {position} got "
                f"{described(value)}. Encode strings as numbers in the data set, or leave their column out."
            )
        if not isinstance(value, ms.Tensor):
            raise TypeError(
                f"For 'GradAccumulationCell', every input must be a Tensor whose axis 0 counts samples, but input "
                f"{position} got {described(value)}. Give the Tensors of a tuple or dict as inputs of their own; make "
                f"anything else an attribute of the network, or a Tensor with one entry for each sample."
            )
    return [value.shape for value in inputs]


def _is_text(value: Any) -> bool:
    """Whether `value` is a string, or an array of strings, as data sets return them."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "SU"
    return isinstance(value, str) or (isinstance(value, ms.Tensor) and value.dtype == ms.string)


def plan_split(
    shapes: Any, micro_size: int | None, micro_batch_size: int | None, shared: tuple[int, ...] = ()
) -> SplitPlan:
    """Where a batch with inputs of these shapes is cut.

    Args:
        shapes (sequence of tuples): The shape of each input.
        micro_size (int or None): Largest number of micro-batches.
        micro_batch_size (int or None): Largest number of samples in a micro-batch; used if `micro_size` is None.
        shared (tuple[int, ...]): The positions of inputs that are not cut, and may have any shape. Not the first.

    Raises:
        ValueError: If there is no input, a position in `shared` has no input, an input has no axis 0, the first axes
            differ, or the batch is empty.
    """
    if not shapes:
        raise ValueError("For 'GradAccumulationCell', a batch must have at least one input, but got none.")
    if max(shared, default=0) >= len(shapes):
        raise ValueError(
            f"For 'GradAccumulationCell', 'split' must share inputs that the batch has, but got "
            f"EvenSplit(shared={shared}) and a batch of {len(shapes)} input(s)."
        )
    cut = {position: shape for position, shape in enumerate(shapes) if position not in shared}
    for position, shape in cut.items():
        if not shape:
            raise ValueError(
                f"For 'GradAccumulationCell', every input must have an axis 0 that counts samples, but input "
                f"{position} got shape (). Make a scalar an attribute of the network, or repeat it for each sample."
            )
    samples = shapes[0][0]
    if any(shape[0] != samples for shape in cut.values()):
        raise ValueError(
            f"For 'GradAccumulationCell', axis 0 of all inputs must have the same length, because all are split at "
            f"the same boundaries, but got shapes {[tuple(shape) for shape in shapes]}."
        )
    if samples < 1:
        raise ValueError(f"For 'GradAccumulationCell', a batch must not be empty, but got shapes {list(shapes)}.")
    size = -(-samples // micro_size) if micro_size is not None else min(micro_batch_size or samples, samples)
    full = samples // size
    return SplitPlan(samples, size, full, samples - full * size)


# -- compiled ----------------------------------------------------------------------------------------------------------


class GraphPlan(NamedTuple):
    """A SplitPlan for a graph. Numbers are ints if the batch's length is known at compile time, else Tensors."""

    samples: Any
    size: Any
    looped: Any  # samples that the loop takes, `size` at a time
    rest: int  # samples after the loop
    whole: bool  # whether the batch is one micro-batch
    shared: tuple[int, ...]  # positions of inputs that are not cut


# A graph with Tensors makes a plain tuple. Its items are taken by number: of items that a statement names and nothing
# uses, MindSpore may warn that "side effect nodes were eliminated by mistake".
SAMPLES, SIZE, LOOPED, REST, WHOLE, SHARED = range(6)


@ops.constexpr(check=False)  # the check warns about open shapes
def _known_plan(shapes, micro_size, micro_batch_size, shared):
    """None where `set_inputs` has left the length of an input open."""
    cut = [shape for position, shape in enumerate(shapes) if position not in shared]
    if any(shape is None or (shape and shape[0] is None) for shape in cut):
        return None
    samples, size, full, rest = plan_split(shapes, micro_size, micro_batch_size, shared)
    return GraphPlan(samples, size, full * size, rest, full == 1 and rest == 0, shared)


_shape_of = ops.MultitypeFuncGraph("gaccum_ms_shape_of")
_gather_rows = ops.MultitypeFuncGraph("gaccum_ms_gather_rows")


@_shape_of.register("Tensor")
def _shape_of_one(value):
    return value.shape


@_gather_rows.register("Tensor", "Tensor")
def _gather_rows_of_one(rows, value):
    return ops.gather(value, rows, 0)


def graph_plan(inputs, micro_size, micro_batch_size, shared):
    """Where a graph cuts its batch."""
    plan = _known_plan(ops.HyperMap()(_shape_of, inputs), micro_size, micro_batch_size, shared)
    if plan is not None:
        return plan
    samples = samples_of(inputs)
    if micro_size is not None:
        size = (samples + (micro_size - 1)) // micro_size
    else:
        size = ops.minimum(samples, ms.Tensor(micro_batch_size, ms.int32))
    return samples, size, samples, 0, micro_size == 1, shared


def rows_from(start, size, looped):
    """The number of samples in the loop's micro-batch that begins at sample `start` ."""
    return ops.minimum(size, looped - start) if isinstance(size, ms.Tensor) else size


def take(
    inputs: Sequence[ms.Tensor], start: ms.Tensor, size: int | ms.Tensor, shared: tuple[int, ...]
) -> list[ms.Tensor]:
    """The `size` samples from sample `start` on, and the shared inputs. `start` : int32 of shape ()."""
    is_open = isinstance(size, ms.Tensor)
    one = ms.Tensor(1, ms.int32)
    rows = ops.range(start, start + size, one) if is_open else start + ms.Tensor(_first_rows(size), ms.int32)
    if not shared:
        return ops.HyperMap()(ops.partial(_gather_rows, rows), inputs)
    return [inputs[i] if i in shared else ops.gather(inputs[i], rows, 0) for i in range(len(inputs))]


def take_rest(inputs: Sequence[ms.Tensor], start: int, shared: tuple[int, ...]) -> list[ms.Tensor]:
    """The samples from `start` on (the smaller last micro-batch of a ragged batch), and the shared inputs."""
    return [inputs[i] if i in shared else inputs[i][start:] for i in range(len(inputs))]


def add_up(turn, sums, inputs, plan, start, loops, *given):
    """The loop over a batch: adds ``turn(*given, rows, *micro_batch)`` to `sums` for each micro-batch from sample
    `start` on. `loops` : whether any micro-batch comes before the smaller last one."""
    size, looped, rest, shared = plan[SIZE], plan[LOOPED], plan[REST], plan[SHARED]
    if loops:
        while start < looped:
            rows = rows_from(start, size, looped)
            sums = sums + turn(*given, rows, *take(inputs, start, rows, shared))
            start = start + rows
    return sums + turn(*given, rest, *take_rest(inputs, looped, shared)) if rest > 0 else sums


def add_up_and_join(turn, noted, inputs, plan, *given):
    """As `add_up` , if ``turn(noted, *given, rows, *micro_batch)`` returns a part of the sums and a micro-batch's
    outputs. Returns the sums and the batch's outputs."""
    samples, size, looped, rest, shared = plan[SAMPLES], plan[SIZE], plan[LOOPED], plan[REST], plan[SHARED]
    # A loop carries Tensors of fixed shapes, and the network's outputs are known only after its first run. So the first
    # micro-batch runs before the loop. The network is then in the graph twice, which costs only compile time.
    start = ms.Tensor(0, ms.int32)
    first = turn(noted, *given, size, *take(inputs, start, size, shared))
    # Each output is as long as the batch, with the first micro-batch's rows at its end. A turn appends its rows and
    # removes as many in front. The tuple begins with an int32, because graph mode forgets the length of a tuple of
    # equal shapes that a loop carries.
    state: tuple = (start + size, first[0])
    for index in range(1, len(first)):
        one = first[index]
        state = (*state, one if one.ndim == 0 else ops.gather(one, _rows_at_end(samples, size), 0))
    if isinstance(size, ms.Tensor) or looped > size:
        while state[0] < looped:
            rows = rows_from(state[0], size, looped)
            micro_batch = take(inputs, state[0], rows, shared)
            state = _following(state, turn(False, *given, rows, *micro_batch), rows)
    if rest > 0:
        state = _following(state, turn(False, *given, rest, *take_rest(inputs, looped, shared)), rest)
    return state[1], state[2:]


def _following(state, turned, rows):
    result: tuple = (state[0] + rows, state[1] + turned[0])
    for index in range(1, len(turned)):
        held, new = state[index + 1], turned[index]
        result = (*result, held + new if new.ndim == 0 else ops.concat((held[rows:], new)))
    return result


def _rows_at_end(samples, size):
    """`samples` row indices: the last `size` are 0, 1, 2, ..., those before them are 0."""
    if isinstance(size, ms.Tensor):
        indices = ops.range(ms.Tensor(0, ms.int32), samples, ms.Tensor(1, ms.int32))
        return ops.maximum(indices - (samples - size), ms.Tensor(0, ms.int32))
    return ms.Tensor(_known_rows_at_end(samples, size), ms.int32)


@ops.constexpr
def _first_rows(size):
    return list(range(size))


@ops.constexpr
def _known_rows_at_end(samples, size):
    return [max(row - (samples - size), 0) for row in range(samples)]
