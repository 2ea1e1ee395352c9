"""What a micro-batch of a window weighs, and what the window's sums are divided by.

* `BySamples` : micro-batches weigh by their samples, constants. Seeds are shares, sums are means.
* `ByCounts` : by counts that the data decide, and micro-batches may be left out. The rank's own are counted first, and
  seeded with their shares; reduction.py then makes the mean over all ranks.
* `ByCountsOfEach` : several losses, each with a total of its own. One accumulator cannot be divided by several totals,
  and one for each loss would cost a backward for each. So the totals come first: the micro-batches are counted, and
  the counts summed over ranks, before the loop; each loss is then seeded with its share. Where all counts are samples
  there is nothing to ask other ranks, and `gradients_mean` says what ranks mean together.

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

from gaccum_ms.accumulation import micro_batches
from gaccum_ms.accumulation.noise import NoiseRecord
from gaccum_ms.accumulation.reduction import CountedReduction
from gaccum_ms.backend.cpu_kernels import all_finite, zeros_like
from gaccum_ms.backend.parameters import hold_weights, record
from gaccum_ms.distributed.ranks import SumOverRanks
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

    def reduce(self, gradients, sums, scale, unit):
        loss = sums / scale
        if self.records_noise:
            gradients, kept = self.noise.reduce(self.grad_reducer, gradients, unit / scale, loss)
            return gradients, scale, ops.depend(loss, kept), True
        return self.grad_reducer(gradients), scale, loss, True


class Counting(nn.Cell):
    """Counts micro-batches: a number, or with several losses one for each.

    Args:
        options (Options): The options.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(auto_prefix=False)
        self.counts = nn.CellList([counts.count_cell(count) for count in options.counts], auto_prefix=False)
        self.by_samples = options.own_count is None
        self.number = options.losses
        self.several = options.several_losses
        self.shape = (self.number,) if self.several else ()

    def of(self, *micro_batch):
        if self.several:
            return ops.stack([self.of_term(term, *micro_batch) for term in range(self.number)])
        return self.of_term(0, *micro_batch)

    def of_term(self, term, *micro_batch):
        return counts.valid_or_nan(self.counts[term](*micro_batch))

    def total(self, inputs, plan):
        """The counts of this rank's batch. Each micro-batch is counted: a bad count must not hide in the others'."""
        total = ops.zeros(self.shape, ms.float32)
        if self.by_samples:
            return total + plan[0]
        return micro_batches.add_up(self.turn, total, inputs, plan, ms.Tensor(0, ms.int32), True)

    def turn(self, size, *micro_batch):
        return self.of(*micro_batch)


class ByCounts(nn.Cell):
    """Micro-batches weigh by counts, and may be left out. `sums` : the loss, the count, how many were dropped."""

    may_skip = True
    needs_division = True

    def __init__(self, made_of: MadeOf) -> None:
        super().__init__(auto_prefix=False)
        options, weights, _, micro_step, store, position = made_of
        hold_weights(self, weights)
        self.micro_step = micro_step
        self.store = store
        self.drops = options.drops
        self.loss_is_mean = micro_step.loss_is_mean
        self.counting = Counting(options)
        self.weighs_samples = self.counting.by_samples
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

    def mean(self, sums, unit):
        """Of this rank's sums: the loss, without its scale."""
        loss, kept = ops.unstack(sums[:2])
        return counts.ratio_or_zero(loss, unit * kept if self.is_mean else unit)

    def reduce(self, gradients, sums, scale, unit):
        return self.reduction(gradients, sums, unit, scale)


class ByCountsOfEach(nn.Cell):
    """Several losses, each divided by its own total. `sums` : each loss's part of its mean."""

    may_skip = True
    needs_division = False
    weighs_samples = False

    def __init__(self, made_of: MadeOf) -> None:
        super().__init__(auto_prefix=False)
        options, weights, grad_reducer, micro_step, store, _ = made_of
        self.micro_step = micro_step
        self.store = store
        self.grad_reducer = grad_reducer
        self.loss_is_mean = micro_step.loss_is_mean
        self.counting = Counting(options)
        self.number = options.losses
        self.loss_weights = ms.Tensor(options.loss_weights, ms.float32)
        self.sum_over_ranks = SumOverRanks(weights, (self.number,))
        self.window_count = record("window_count", (self.number,))
        self.loss_terms = record("loss_terms", (self.number,))

    def seed_per_item(self, inputs, plan, scale):
        """One over the total, for each loss."""
        totals = self.counting.total(inputs, plan)
        if not self.counting.by_samples:
            totals = self.sum_over_ranks.alone(totals)
        totals = ops.depend(totals, ops.assign(self.window_count, totals))
        return counts.ratio_or_zero(scale * ops.ones_like(totals), totals)

    def zero_sums(self):
        return ops.zeros((self.number,), ms.float32)

    def turn(self, noted, unit, prepared, size, *micro_batch):
        items = self.counting.of(*micro_batch)
        seeds = unit * items if self.loss_is_mean else unit
        sums = self.zero_sums()
        if (items > 0).all():
            sums, gradients = self.micro_step.run(seeds, prepared, size, *micro_batch)
            sums = ops.depend(sums, self.store.add(gradients))
        else:
            # A mean over nothing is NaN, and a zero seed times NaN is NaN: each loss that has items goes back alone.
            items_of = ops.unstack(items)
            for term in range(self.number):
                if items_of[term] > 0:
                    part, gradients = self.micro_step.run_alone(term, seeds, *micro_batch)
                    sums = sums + ops.depend(part, self.store.add(gradients))
        return sums

    def reduce(self, gradients, sums, scale, unit):
        if self.counting.by_samples:
            gradients = self.grad_reducer(gradients)
        else:
            gradients, sums = self.sum_over_ranks(gradients, sums)
        terms = sums / scale
        loss = ops.reduce_sum(terms * self.loss_weights)
        loss = ops.depend(loss, ops.assign(self.loss_terms, terms))
        total = ops.depend(self.window_count, loss)
        return gradients, scale, loss, ops.logical_and((total >= 0).all(), (total > 0).any())
