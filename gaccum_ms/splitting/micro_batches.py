"""A batch and its micro-batches in a graph: where the boundaries are, and how a compiled loop takes one slice.

All inputs of a batch are cut at the same boundaries, along the axis that `EvenSplit` names, except those that it
shares. All micro-batches have ``ceil(N / micro_size)`` samples, so that one compiled loop body runs them all; the
remaining samples are one smaller micro-batch at the end. Ten samples in four micro-batches are 3 + 3 + 3 + 1, nine in
four are 3 + 3 + 3: there are never more micro-batches than requested, and never a larger one.

A BatchNorm that trains needs two samples. No micro-batch of a short batch then has one: ten samples in four are 3 + 3 +
4, five in eight are 2 + 3. Only the last micro-batch is larger, by one sample.

Where `set_inputs` leaves the number of samples open, the graph computes the boundaries as Tensors, and the last
micro-batch is the loop's last iteration. The boundaries are the same, and one graph runs batches of all lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
from mindspore import ops

from gaccum_ms.backend.open_lengths import samples_of
from gaccum_ms.splitting.even_split import UNCUT, cut_axes
from gaccum_ms.splitting.even_split import SplitPlan as SplitPlan
from gaccum_ms.splitting.even_split import plan_split as plan_split

# -- compiled ----------------------------------------------------------------------------------------------------------

# In a graph, a SplitPlan is a tuple. Its numbers are ints if the batch's length is known at compile time, else Tensors.
# Code reads `plan[SIZE]` , and does not unpack the tuple: MindSpore may warn of a name that nothing uses ("side effect
# nodes were eliminated by mistake").
(
    SAMPLES,
    SIZE,
    LOOPED,  # samples that the loop takes, `SIZE` at a time
    REST,  # samples after the loop
    WHOLE,  # whether the batch is one micro-batch
    AXES,  # the axis of samples of each input, or UNCUT; () if it is axis 0 of all
    LEAST,  # as in plan_split
) = range(7)


@ops.constexpr(check=False)  # the check warns about open shapes
def _axes(number, shared, axis):
    axes = cut_axes(number, shared, axis)
    return axes if any(axes) else ()


@ops.constexpr(check=False)  # the check warns about open shapes
def _known_plan(shapes, micro_size, micro_batch_size, shared, axis, least):
    """None where `set_inputs` has left the length of an input open."""
    axes = cut_axes(len(shapes), shared, axis)
    for shape, cut_at in zip(shapes, axes, strict=True):
        if cut_at != UNCUT and (shape is None or (len(shape) > cut_at and shape[cut_at] is None)):
            return None
    samples, size, full, rest = plan_split(shapes, micro_size, micro_batch_size, shared, axis, least)
    return samples, size, full * size, rest, full == 1 and rest == 0, axes if any(axes) else (), least


_shape_of = ops.MultitypeFuncGraph("gaccum_ms_shape_of")
_gather_rows = ops.MultitypeFuncGraph("gaccum_ms_gather_rows")


@_shape_of.register("Tensor")
def _shape_of_one(value):
    return value.shape


@_gather_rows.register("Tensor", "Tensor")
def _gather_rows_of_one(rows, value):
    return ops.gather(value, rows, 0)


def graph_plan(inputs, micro_size, micro_batch_size, shared, axis, least):
    """Where a graph cuts its batch."""
    plan = _known_plan(ops.HyperMap()(_shape_of, inputs), micro_size, micro_batch_size, shared, axis, least)
    if plan is not None:
        return plan
    axes = _axes(len(inputs), shared, axis)
    least = 1 if micro_batch_size == 1 else least
    samples = samples_of(inputs, axis_at(axes, 0))
    if micro_size is not None:
        size = ops.maximum((samples + (micro_size - 1)) // micro_size, ops.minimum(samples, ms.Tensor(least, ms.int32)))
    else:
        size = ops.minimum(samples, ms.Tensor(micro_batch_size, ms.int32))
    if least > 1:  # if one sample is left, the only micro-batch takes it
        size = ops.select(samples == size + 1, samples, size)
    return samples, size, samples, 0, micro_size == 1, axes, least


def plan_of_rest(plan):
    """The plan in which the samples after the loop are a loop's only micro-batch."""
    samples, rest = plan[SAMPLES], plan[REST]
    return samples, rest, samples, 0, False, plan[AXES], plan[LEAST]


def plan_of_whole(rows, inputs):
    """The plan in which `inputs` Tensors are one micro-batch as they are."""
    return rows, rows, rows, 0, True, (UNCUT,) * inputs, 1


def axis_at(axes, position):
    """The axis of samples of an input. Tensors after the batch's inputs have it in front."""
    return axes[position] if position < len(axes) else 0


def rows_from(start, plan):
    """The number of samples in the loop's micro-batch that begins at sample `start` ."""
    size = plan[SIZE]
    if not isinstance(size, ms.Tensor):
        return size
    left = plan[LOOPED] - start
    if plan[LEAST] > 1:  # the last micro-batch takes a single sample that would be left
        return ops.select(left == size + 1, left, ops.minimum(size, left))
    return ops.minimum(size, left)


def rows_at_the_end(plan):
    """The number of samples in the last micro-batch."""
    samples, size, rest = plan[SAMPLES], plan[SIZE], plan[REST]
    if not isinstance(size, ms.Tensor):
        return rest if rest > 0 else size
    last = (samples - 1) % size + 1
    if plan[LEAST] > 1:
        return ops.select(ops.logical_and(last == 1, samples > 1), size + 1, last)
    return last


def take(
    inputs: Sequence[ms.Tensor], start: ms.Tensor, size: int | ms.Tensor, axes: tuple[int, ...]
) -> tuple[ms.Tensor, ...]:
    """The `size` samples from sample `start` on, and the shared inputs. `start` : int32 of shape ()."""
    is_open = isinstance(size, ms.Tensor)
    step = ms.Tensor(1, ms.int32)
    rows = ops.range(start, start + size, step) if is_open else start + ms.Tensor(_row_indices(size, size), ms.int32)
    if not axes:
        return ops.HyperMap()(ops.partial(_gather_rows, rows), inputs)
    micro_batch: tuple = ()  # a comprehension would be a loop, which takes the compiler longer
    for position in range(len(inputs)):
        micro_batch = (*micro_batch, _gathered(inputs[position], rows, axis_at(axes, position)))
    return micro_batch


def _gathered(value, rows, axis):
    return value if axis < 0 else ops.gather(value, rows, axis)


def take_rest(inputs: Sequence[ms.Tensor], start: int, axes: tuple[int, ...]) -> tuple[ms.Tensor, ...]:
    """The samples from `start` on (the last micro-batch of a ragged batch), and the shared inputs."""
    micro_batch: tuple = ()
    for position in range(len(inputs)):
        micro_batch = (*micro_batch, _without_first(inputs[position], start, axis_at(axes, position)))
    return micro_batch


def _without_first(value, start, axis):
    if axis < 0:
        return value
    return value[start:] if axis == 0 else ops.swapaxes(ops.swapaxes(value, 0, axis)[start:], 0, axis)


def add_up(part_of, of_loop, of_last, sums, inputs, plan, *arguments):
    """The loop over a batch: adds ``part_of(of_loop, *arguments, rows, *micro_batch)`` to `sums` for each micro-batch;
    for the last one of another size, with `of_last` ."""
    looped, rest, axes = plan[LOOPED], plan[REST], plan[AXES]
    start = ms.Tensor(0, ms.int32)
    while start < looped:
        rows = rows_from(start, plan)
        sums = sums + part_of(of_loop, *arguments, rows, *take(inputs, start, rows, axes))
        start = start + rows
    return sums + part_of(of_last, *arguments, rest, *take_rest(inputs, looped, axes)) if rest > 0 else sums


def following(state, part, rows):
    """The state of a loop after a micro-batch: the next one's start; the sums; and the outputs, in which its rows are
    appended and as many in front removed. `part` : its row, then its outputs."""
    result: tuple = (state[0] + rows, state[1] + part[0])
    for index in range(1, len(part)):
        before, new = state[index + 1], part[index]
        result = (*result, before + new if new.ndim == 0 else ops.concat((before[rows:], new)))
    return result


def padded_in_front(samples, size):
    """`samples` row indices: the last `size` are 0, 1, 2, ..., those before them are 0."""
    if isinstance(size, ms.Tensor):
        indices = ops.range(ms.Tensor(0, ms.int32), samples, ms.Tensor(1, ms.int32))
        return ops.maximum(indices - (samples - size), ms.Tensor(0, ms.int32))
    return ms.Tensor(_row_indices(samples, size), ms.int32)


@ops.constexpr
def _row_indices(samples, size):
    return [max(row - (samples - size), 0) for row in range(samples)]
