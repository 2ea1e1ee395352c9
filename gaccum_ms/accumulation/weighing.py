"""What a micro-batch of a window weighs, and what the window's sums are divided by.

* `BySamples` : micro-batches weigh by their samples, constants. Seeds are shares, sums are means.
* `ByCounts` : by counts that the data decide, and micro-batches may be left out. The rank's own are counted first, and
  seeded with their shares; reduction.py then makes the mean over all ranks.
* `ByCountsWithOutputs` : forward and backward run first, and then is decided whether they are added: where the network
  itself returns its count, or outputs (outputs.py), which are those of all samples, also of what is left out.
* `ByCountsOfEach` : several losses, each with a total of its own (several_losses.py).

Each kind has these methods, which are compiled:

    seed_per_item       the seed of a micro-batch of one item, called `unit` everywhere
    zero_sums           what the loop's sums begin with
    turn                one turn of the loop: forward, backward and add, unless the micro-batch is left out
    reduce              over ranks: gradients, what they are to be divided by, the loss, whether there is an update
"""

from __future__ import annotations

from typing import NamedTuple

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.accumulation.counting import Counting
from gaccum_ms.accumulation.noise import NoiseRecord
from gaccum_ms.accumulation.reduction import CountedReduction
from gaccum_ms.backend.cpu_kernels import all_finite, zeros_like
from gaccum_ms.backend.parameters import hold_weights
from gaccum_ms.losses import counts
from gaccum_ms.options import Options


class MadeOf(NamedTuple):
    """What a weighing is made of."""

    options: Options
    weights: ms.ParameterTuple
    grad_reducer: nn.Cell  # over ranks
    micro_step: nn.Cell  # forward and backward
    store: nn.Cell  # where gradients add up
    position: ms.Parameter | None  # where a window has several batches, the number of them so far


class BySamples(nn.Cell):
    """Micro-batches weigh by their samples; `sums` : the loss. A loss that is no mean over samples weighs as it is."""

    may_skip = False  # whether there are windows that must not update
    needs_division = False  # whether gradients are sums, to be divided by more than the loss scale
    weighs_samples = False  # whether counts are taken at run time, though they are samples

    def __init__(self, made_of: MadeOf) -> None:
        super().__init__(auto_prefix=False)
        options, _, grad_reducer, micro_step, store, position = made_of
        self.micro_step = micro_step
        self.store = store
        self.grad_reducer = nn.Identity() if store.reduces else grad_reducer
        self.loss_is_mean = micro_step.loss_is_mean
        self.records_noise = options.record_noise
        if options.record_noise:
            self.noise = NoiseRecord(grad_reducer, position=position)

    def seed_per_item(self, inputs, plan, scale):
        return scale / plan[0] if self.loss_is_mean else scale

    def items(self, size):
        """What the seed of a micro-batch is a multiple of."""
        return size if self.loss_is_mean else 1

    def zero_sums(self):
        return ms.Tensor(0.0, ms.float32)

    def run(self, noted, unit, prepared, size, *micro_batch):
        """A micro-batch's part of the sums, and its gradients."""
        part, gradients = self.micro_step.run(unit * self.items(size), prepared, size, *micro_batch)
        if noted:
            part = ops.depend(part, self.noise.note(gradients, unit, counts.float32(size)))
        return part, gradients

    def turn(self, noted, unit, prepared, size, *micro_batch):
        # `*`: of one tuple of equal shapes, passed to where an `if` on a Tensor is, graph mode forgets the length.
        part, gradients = self.run(noted, unit, prepared, size, *micro_batch)
        return ops.depend(part, self.store.add(gradients))

    def own_mean(self, parts, sums, scale, unit):
        """Of this rank's batch: of the loss or an output of shape (), whose parts are summed, without its scale."""
        return parts / scale

    def reduce(self, gradients, sums, scale, unit):
        loss = sums / scale
        if self.records_noise:
            gradients, kept = self.noise.reduce(self.grad_reducer, gradients, unit / scale, loss)
            return gradients, scale, ops.depend(loss, kept), True
        return self.grad_reducer(gradients), scale, loss, True


class BySamplesWithOutputs(BySamples):
    """By samples, and with outputs."""

    def run(self, noted, unit, prepared, size, *micro_batch):
        """A micro-batch's part of the sums with its outputs, in a tuple, and its gradients."""
        outputs, gradients = self.micro_step.run(unit * self.items(size), prepared, size, *micro_batch)
        part = outputs[0]
        if noted:
            part = ops.depend(part, self.noise.note(gradients, unit, counts.float32(size)))
        return (part, *outputs[1:]), gradients

    def turn(self, noted, unit, prepared, size, *micro_batch):
        outputs, gradients = self.run(noted, unit, prepared, size, *micro_batch)
        return (ops.depend(outputs[0], self.store.add(gradients)), *outputs[1:])


class ByCounts(nn.Cell):
    """Micro-batches weigh by counts, and may be left out. `sums` : the loss, the count, how many were dropped."""

    may_skip = True
    needs_division = True
    runs_all = False  # whether micro-batches that count nothing run too

    def __init__(self, made_of: MadeOf) -> None:
        super().__init__(auto_prefix=False)
        options, weights, _, micro_step, store, position = made_of
        hold_weights(self, weights)
        self.micro_step = micro_step
        self.store = store
        self.drops = options.drops
        self.loss_is_mean = micro_step.loss_is_mean
        self.counting = Counting(options)
        self.weighs_samples = not options.counts_items
        # A sum without a count, allowed in windows that span batches, is not divided by anything.
        self.is_mean = self.loss_is_mean or not self.weighs_samples
        self.reduction = CountedReduction(
            weights, self.weighs_samples, self.is_mean, store.reduces, options.record_noise, position
        )
        if options.record_noise:
            self.noise = self.reduction.noise
        self.window_count = self.reduction.window_count
        self.dropped_micro_batches = self.reduction.dropped_micro_batches
        self.map = ops.HyperMap()

    def seed_per_item(self, inputs, plan, scale):
        """One over this rank's own total: what goes backward, and into the accumulators, is then as small as the whole
        batch's, and overflows in low precision no sooner. `reduce` multiplies by it again."""
        total = self.expected(self.counting.total(inputs, plan))
        return scale / ops.select(total > 0, total, ops.ones_like(total))

    def expected(self, total):
        """Of this rank's own total, the one that units are made of: ranks that add to the same sums have it in common.
        NaN where a count is bad."""
        return self.reduction.mean_over_ranks(total) if self.store.reduces else total

    def items(self, count):
        return count if self.loss_is_mean else 1

    def zero_sums(self):
        return ms.Tensor([0.0, 0.0, 0.0], ms.float32)

    def turn(self, noted, unit, prepared, size, *micro_batch):
        count = self.counting.of(*micro_batch)
        # A mean over nothing is NaN, and so is its gradient: such a micro-batch is not run at all. Not so a NaN count,
        # which must reach the total.
        sums = ops.stack((ops.zeros_like(count), count, ops.zeros_like(count)))
        if self.store.reduces:
            sums = self.reduced_turn(unit, prepared, size, count, *micro_batch)
        elif count > 0:
            sums = self.counted_turn(noted, unit, prepared, size, count, *micro_batch)
        return sums

    def reduced_turn(self, unit, prepared, size, count, *micro_batch):
        """Adds in any case: the other ranks, which may count something, wait for it."""
        seeded_loss = ops.zeros_like(count)
        gradients = self.map(zeros_like, self.weights)
        if count > 0:
            seeded_loss, gradients = self.micro_step.run(unit * self.items(count), prepared, size, *micro_batch)
        return ops.depend(ops.stack((seeded_loss, count, ops.zeros_like(count))), self.store.add(gradients))

    def counted_turn(self, noted, unit, prepared, size, count, *micro_batch):
        seeded_loss, gradients = self.micro_step.run(unit * self.items(count), prepared, size, *micro_batch)
        return self.taken(noted, unit, count, seeded_loss, gradients)

    def taken(self, noted, unit, count, seeded_loss, gradients):
        """What counts something is added, unless it overflowed and is to be dropped."""
        sums = ops.stack((seeded_loss, count, ops.zeros_like(count)))
        if self.drops:
            if ops.logical_and(all_finite(gradients), ops.isfinite(seeded_loss)):
                sums = self.added(sums, noted, unit, count, gradients)
            else:
                sums = ms.Tensor([0.0, 0.0, 1.0], ms.float32)
        else:
            sums = self.added(sums, noted, unit, count, gradients)
        return sums

    def added(self, sums, noted, unit, count, gradients):
        if noted:
            sums = ops.depend(sums, self.noise.note(gradients, unit, count))
        return ops.depend(sums, self.store.add(gradients))

    def own_mean(self, parts, sums, scale, unit):
        """Of this rank's batch: of the loss or an output of shape (), whose parts are summed, without its scale."""
        kept = ops.unstack(sums)[1]
        return counts.ratio_or_zero(parts, unit * kept if self.is_mean else unit)

    def counted(self, sums, total):
        """What a batch of several counts, of which `total` was counted before it ran."""
        return total

    def reduce(self, gradients, sums, scale, unit):
        return self.reduction(gradients, sums, unit, scale)


class ByCountsWithOutputs(ByCounts):
    """By counts that are given, or that the network returns. Then a batch's samples stand for them in the unit: the
    accumulators hold numbers of the size of a sample's sum."""

    runs_all = True

    def __init__(self, made_of: MadeOf) -> None:
        super().__init__(made_of)
        self.ratio = made_of.options.returns_ratio
        self.aux = made_of.options.aux

    def turn(self, noted, unit, prepared, size, *micro_batch):
        if self.ratio:
            outputs, gradients = self.micro_step.run(unit, prepared, size, *micro_batch)
            count, shown = outputs[1], outputs[2:]
        else:
            count = self.counting.of(*micro_batch)
            outputs, gradients = self.micro_step.run(unit * self.items(count), prepared, size, *micro_batch)
            shown = outputs[1:]
        # A NaN count must reach the total.
        sums = ops.stack((ops.zeros_like(count), count, ops.zeros_like(count)))
        if self.store.reduces:
            sums = self.added_on_all_ranks(sums, count, outputs[0], gradients)
        elif count > 0:
            sums = self.taken(noted, unit, count, outputs[0], gradients)
        return (sums, *of_taken(shown, ops.unstack(sums)[1] > 0)) if self.aux else sums

    def added_on_all_ranks(self, sums, count, seeded_loss, gradients):
        added = self.map(zeros_like, self.weights)
        if count > 0:
            sums = ops.stack((seeded_loss, count, ops.zeros_like(count)))
            added = gradients
        return ops.depend(sums, self.store.add(added))

    def counted(self, sums, total):
        return ops.unstack(sums)[1] if self.ratio else total


# -- compiled ----------------------------------------------------------------------------------------------------------


def of_taken(outputs, taken):
    """Outputs of a micro-batch; of one that is left out, the scalars are zero."""
    result: tuple = ()
    for index in range(len(outputs)):
        one = outputs[index]
        if one.ndim == 0:
            one = ops.select(taken, one, ops.zeros_like(one))
        result = (*result, one)
    return result
