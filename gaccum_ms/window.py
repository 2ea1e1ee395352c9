"""A window: its micro-batches go forward and backward one at a time, and their gradients add up.

Three kinds, by what is known before the loop:

* `SampleWindow`, here: micro-batches weigh by their samples, constants. Seeds are shares, sums are means.
* `CountedWindow` (counted_window.py): weights are counts that the data decide, or micro-batches may be dropped. Seeds
  are shares of the rank's own count; the total of all ranks is known after the reduction.
* `MultiLossWindow` (multi_loss_window.py): several losses, each with a total of its own, counted before the loop.

A fourth, `SpanningWindow` (spanning_window.py), is a `CountedWindow` that stays open for several batches. A fifth,
`UnrolledWindow` (unrolled_window.py), has no loop: it is for the modes in which MindSpore's compiler accumulates. A
sixth, `BatchLossWindow` (batch_loss_window.py), has two: for a loss that needs all samples of the batch at once.

All are compiled: from `run` down, methods are parsed by graph mode. What the loop carries is one float32 Tensor,
`sums`.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import nn, ops
from mindspore.ops.functional import typeof

from gaccum_ms import split
from gaccum_ms.accumulator import Accumulators, hold_weights
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.noise_record import NoiseRecord
from gaccum_ms.sharded_accumulators import ShardedAccumulators, check_micro_batches
from gaccum_ms.shards import rank_and_ranks

# What a graph calls the kinds of values that a network may return by mistake.
_KINDS = {"Dict": "a dict", "TypeNone": "None", "Float": "a number", "Int": "a number", "Bool": "a bool"}
_KINDS |= {"String": "a str", "Tuple": "a tuple", "List": "a list"}


@ops.constexpr
def _check_losses(kinds, shapes, number):
    for kind, shape in zip(kinds, shapes, strict=True):
        if shape is None:
            name = type(kind).__name__
            raise TypeError(
                f"For 'GradAccumulationCell', the network must return its loss, a Tensor of shape (), or a tuple of "
                f"such losses, but got {_KINDS.get(name, name)}. Return what the loss function returns, and nothing "
                f"else: of a dict the entry that is the loss, of a Python number the Tensor it was computed from."
            )
    if len(shapes) != number:
        raise ValueError(
            f"For 'GradAccumulationCell', the network must return {number} loss(es), by 'count' and 'loss_weights', "
            f"but got {len(shapes)} output(s). Give one entry of 'loss_weights' for each loss, and return losses alone."
        )
    for kind, shape in zip(kinds, shapes, strict=True):
        if shape != ():
            raise ValueError(
                f"For 'GradAccumulationCell', the network must return a scalar loss of shape (), but got shape "
                f"{shape}. Use a loss with reduction='mean', or take the mean in the network."
            )
        if kind.element_type() not in ms.common.dtype.float_type:
            raise TypeError(
                f"For 'GradAccumulationCell', the network must return a loss of a float dtype, but got "
                f"{kind.element_type()}, through which no gradient comes. Cast nothing in the loss to integers."
            )


def _shape_or_none(value):
    return value.shape if isinstance(value, ms.Tensor) else None


def float32_losses(losses, number):
    """The losses that a network returned, a Tensor or a tuple, checked to be `number` scalars."""
    if not isinstance(losses, (tuple, list)):
        losses = (losses,)
    _check_losses([typeof(loss) for loss in losses], [_shape_or_none(loss) for loss in losses], number)
    return [ops.cast(loss, ms.float32) for loss in losses]


class SampleWindow(nn.Cell):
    """Micro-batches weigh by their samples."""

    gated = False  # whether there are windows that must not update
    divides = False  # whether gradients are sums, to be divided by more than the loss scale
    spans_batches = False  # whether accumulators hold something between two calls
    shards = False  # whether each micro-batch is reduced over ranks, and a rank accumulates its part

    def __init__(self, cell: GradAccumulationCell, weights: ms.ParameterTuple, grad_reducer: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network = cell.network
        hold_weights(self, weights)
        self.grad_reducer = grad_reducer
        self.micro_size = cell.micro_size
        self.micro_batch_size: int | None = None if cell.finds_size else cell.micro_batch_size  # see auto_size.py
        self.loss_is_mean = cell.reduction == "mean"
        self.map = ops.HyperMap()
        self.records_noise = cell.record_noise
        if cell.record_noise and not self.divides:
            self.noise = NoiseRecord(grad_reducer)
        self.backward = ops.value_and_grad(self.seeded_loss, None, weights)
        self.accumulates = cell.accumulates or self.spans_batches
        if self.accumulates:
            kept_by = cell.accumulator_dtype, cell.compensated
            self.shards = cell.shard_accumulators and rank_and_ranks()[1] > 1
            if self.shards:
                means = not self.divides and ms.get_auto_parallel_context("gradients_mean")
                self.accumulators = ShardedAccumulators(weights, *kept_by, means)
                self.grad_reducer = nn.Identity()  # what comes from these accumulators is reduced
            else:
                self.accumulators = Accumulators(weights, *kept_by)

    # -- compiled: the loop --------------------------------------------------------------------------------------------

    def run(self, inputs, scale):
        """Forward, backward and add for the whole window; returns the gradients, reduced over ranks, what they are to
        be divided by, the loss, and whether there is anything to update with."""
        samples, size, _, _, whole = split.graph_plan(inputs, self.micro_size, self.micro_batch_size)
        if whole and not self.gated and not self.shards:
            # Nothing to accumulate over: the gradients need no detour through accumulators.
            unit = self.unit(inputs, samples, scale)
            sums, gradients = self.backward(unit * self.items(size), *inputs)
            if self.records_noise:
                sums = ops.depend(sums, self.note(gradients, unit, split.float32(size)))
            return self.reduce(gradients, sums, scale, unit)
        return self.finish(*self.gather(inputs, scale))

    def gather(self, inputs, scale):
        """The part of `run` that this rank does alone; returns what `finish` takes."""
        unit = self.unit(inputs, split.samples_of(inputs), scale)
        return self.add_up(inputs, unit), unit, scale

    def finish(self, sums, unit, scale):
        """The rest of `run` ."""
        return self.reduce(self.accumulators.read(sums), sums, scale, unit)

    def add_up(self, inputs, unit):
        """Forward, backward and add for each micro-batch of a batch; returns the batch's sums."""
        _, size, looped, rest, _ = split.graph_plan(inputs, self.micro_size, self.micro_batch_size)
        sums = self.nothing()
        start = ms.Tensor(0, ms.int32)
        if self.records_noise:
            # Before the loop, and so in the graph twice: a branch in the loop would cost in each of its turns.
            sums = sums + self.micro_step(True, unit, size, *split.take(inputs, start, size))
            start = start + size
        if not self.records_noise or looped > size:
            while start < looped:
                rows = split.rows_from(start, size, looped)
                sums = sums + self.micro_step(False, unit, rows, *split.take(inputs, start, rows))
                start = start + rows
        if rest > 0:
            sums = sums + self.micro_step(False, unit, rest, *split.take_rest(inputs, looped))
        return sums

    def micro_step(self, noted, unit, size, *micro_batch):
        # `*`: of one tuple of equal shapes, passed to where an `if` on a Tensor is, graph mode forgets the length.
        seeded_loss, gradients = self.backward(unit * self.items(size), *micro_batch)
        if noted:
            seeded_loss = ops.depend(seeded_loss, self.note(gradients, unit, split.float32(size)))
        return ops.depend(seeded_loss, self.add(gradients))

    def seeded_loss(self, seed, *micro_batch):
        """The loss times its seed. Scaling here, in the backward's seed, costs no pass over the gradients, and gives
        each sample the gradient that it has in the whole batch, in low precision too."""
        return float32_losses(self.network(*micro_batch), 1)[0] * seed

    # -- compiled: what differs between kinds of windows ---------------------------------------------------------------

    def unit(self, inputs, samples, scale):
        """The seed of a micro-batch of one item."""
        return scale / samples if self.loss_is_mean else scale

    def items(self, count):
        """What the seed of a micro-batch is a multiple of: a loss that is a sum over its items weighs as it is."""
        return count if self.loss_is_mean else 1

    def nothing(self):
        """What the loop's sums begin with."""
        return ms.Tensor(0.0, ms.float32)

    def note(self, gradients, unit, items):
        """Note the gradient of a batch's first micro-batch, if the batch is its window's first."""
        return self.noise.note(gradients, unit, items)

    def reduce(self, gradients, sums, scale, unit):
        """See `run`."""
        loss = sums / scale
        if self.records_noise:
            gradients, kept = self.noise.reduce(self.grad_reducer, gradients, unit / scale, loss)
            return gradients, scale, ops.depend(loss, kept), True
        return self.grad_reducer(gradients), scale, loss, True

    # -- compiled: the accumulators ------------------------------------------------------------------------------------

    def add(self, gradients):
        return self.accumulators.add(gradients)

    def clear(self, after):
        """Zero the accumulators, once `after` is there."""
        if self.records_noise:
            after = ops.depend(after, self.noise.clear(after))
        return self.accumulators.clear(after) if self.accumulates else after

    # -- not compiled --------------------------------------------------------------------------------------------------

    def check_plan(self, plan: split.SplitPlan) -> None:
        """Before a batch: what all ranks must have alike. A collective where there is such a thing."""
        if self.shards:
            check_micro_batches(-(-plan.samples // plan.size))

    def forget(self) -> None:
        """Zero the accumulators after a window that did not end."""
        if self.accumulates:
            self.accumulators.forget()
        if self.records_noise:
            self.noise.forget()
