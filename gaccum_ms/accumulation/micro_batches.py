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

from gaccum_ms.losses.counts import samples_of
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
    parts: tuple = ()  # a comprehension would be a loop, which takes the compiler longer
    for position in range(len(inputs)):
        parts = (*parts, _gathered(inputs[position], rows, axis_at(axes, position)))
    return parts


def _gathered(value, rows, axis):
    return value if axis < 0 else ops.gather(value, rows, axis)


def take_rest(inputs: Sequence[ms.Tensor], start: int, axes: tuple[int, ...]) -> tuple[ms.Tensor, ...]:
    """The samples from `start` on (the last micro-batch of a ragged batch), and the shared inputs."""
    parts: tuple = ()
    for position in range(len(inputs)):
        parts = (*parts, _without_first(inputs[position], start, axis_at(axes, position)))
    return parts


def _without_first(value, start, axis):
    if axis < 0:
        return value
    return value[start:] if axis == 0 else ops.swapaxes(ops.swapaxes(value, 0, axis)[start:], 0, axis)


def add_up(part_of, part_of_last, sums, inputs, plan, loops, *arguments):
    """The loop over a batch: adds ``part_of(*arguments, rows, *micro_batch)`` to `sums` for each micro-batch, and
    `part_of_last` for the last one of another size. `loops` : whether those before it are not added yet."""
    looped, rest, axes = plan[LOOPED], plan[REST], plan[AXES]
    if loops:
        start = ms.Tensor(0, ms.int32)
        while start < looped:
            rows = rows_from(start, plan)
            sums = sums + part_of(*arguments, rows, *take(inputs, start, rows, axes))
            start = start + rows
    return sums + part_of_last(*arguments, rest, *take_rest(inputs, looped, axes)) if rest > 0 else sums


def add_up_and_join(of_first, of_loop, of_last, inputs, plan, *arguments):
    """As `add_up` , for weighings whose ``run_and_add(*arguments, rows, *micro_batch)`` returns a part of the
    sums and a micro-batch's outputs. Returns the sums and the batch's outputs, which have samples on axis 0, or shape
    ()."""
    samples, size, looped, rest, axes = plan[SAMPLES], plan[SIZE], plan[LOOPED], plan[REST], plan[AXES]
    # A loop carries Tensors of fixed shapes, and the network's outputs are known only after its first run. So the first
    # micro-batch runs before the loop. The network is then in the graph twice, which costs only compile time.
    start = ms.Tensor(0, ms.int32)
    micro_batch = take(inputs, start, size, axes)
    if not of_first.leaves_out:
        first = of_first.run_and_add(*arguments, size, *micro_batch)
    else:
        ran, gradients = of_first.run(*arguments, size, of_first.count_before(micro_batch), *micro_batch)
        sums = of_first.rejected(ran)
        takes = of_first.takes(ran, gradients)
        while takes:  # once or not at all, here and in the loop: see the rules at the head of step.py
            sums = of_first.added(arguments[0], ran, gradients)
            takes = ms.Tensor(False)
        first = of_first.with_outputs(sums, ran)
    # Each output is as long as the batch, with the first micro-batch's rows at its end. An iteration appends its rows
    # and removes as many in front. The tuple begins with an int32, because graph mode forgets the length of a tuple of
    # equal shapes that a loop carries.
    state: tuple = (start + size, first[0])
    for index in range(1, len(first)):
        output = first[index]
        if output.ndim > 0:
            output = ops.gather(output, _rows_at_end(samples, size), 0)
        state = (*state, output)
    if isinstance(size, ms.Tensor) or looped > size:
        if of_loop.leaves_out:
            state = _joined_of_taken(of_loop, state, inputs, plan, *arguments)
        else:
            while state[0] < looped:
                rows = rows_from(state[0], plan)
                part = of_loop.run_and_add(*arguments, rows, *take(inputs, state[0], rows, axes))
                state = _following(state, part, rows)
    if rest > 0:
        state = _following(state, of_last.run_and_add(*arguments, rest, *take_rest(inputs, looped, axes)), rest)
    return state[1], state[2:]


def _joined_of_taken(weighing, state, inputs, plan, *arguments):
    """The loop, for micro-batches that may be left out after they ran."""
    while state[0] < plan[LOOPED]:
        rows = rows_from(state[0], plan)
        micro_batch = take(inputs, state[0], rows, plan[AXES])
        ran, gradients = weighing.run(*arguments, rows, weighing.count_before(micro_batch), *micro_batch)
        sums = weighing.rejected(ran)
        takes = weighing.takes(ran, gradients)
        while takes:
            sums = weighing.added(arguments[0], ran, gradients)
            takes = ms.Tensor(False)
        state = _following(state, weighing.with_outputs(sums, ran), rows)
    return state


def _following(state, part, rows):
    result: tuple = (state[0] + rows, state[1] + part[0])
    for index in range(1, len(part)):
        before, new = state[index + 1], part[index]
        result = (*result, before + new if new.ndim == 0 else ops.concat((before[rows:], new)))
    return result


def _rows_at_end(samples, size):
    """`samples` row indices: the last `size` are 0, 1, 2, ..., those before them are 0."""
    if isinstance(size, ms.Tensor):
        indices = ops.range(ms.Tensor(0, ms.int32), samples, ms.Tensor(1, ms.int32))
        return ops.maximum(indices - (samples - size), ms.Tensor(0, ms.int32))
    return ms.Tensor(_row_indices(samples, size), ms.int32)


@ops.constexpr
def _row_indices(samples, size):
    return [max(row - (samples - size), 0) for row in range(samples)]
