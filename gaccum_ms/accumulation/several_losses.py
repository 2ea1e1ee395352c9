"""Weighing for a network that returns several losses, each with its own total.

One accumulator cannot be divided by several totals, and one accumulator for each loss would cost a backward for each.
So the totals come first: before the loop, micro-batches are counted and the counts are summed over ranks. Each loss is
then seeded with its share. If all counts are samples, the counts need no reduction, and `gradients_mean` decides
between mean and sum over ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.accumulation import micro_batches
from gaccum_ms.accumulation.counting import Counting
from gaccum_ms.backend.parameters import record
from gaccum_ms.distributed.ranks import SumOverRanks
from gaccum_ms.losses import counts

if TYPE_CHECKING:
    from gaccum_ms.accumulation.weighing import WeighingParts


class ByCountsOfEach(nn.Cell):
    """Several losses, each divided by its own total. `sums` : each loss's part of its mean."""

    may_skip = True
    needs_division = False
    weighs_samples = False

    def __init__(self, parts: WeighingParts) -> None:
        super().__init__(auto_prefix=False)
        options, weights, grad_reducer, micro_step, store, _ = parts
        self.micro_step = micro_step
        self.store = store
        self.grad_reducer = grad_reducer
        self.loss_is_mean = micro_step.loss_is_mean
        self.counting = Counting(options)
        self.leaves_out = not self.counting.by_samples
        self.min_count = options.min_count
        self.number = options.losses
        self.loss_weights = ms.Tensor(options.loss_weights, ms.float32)
        self.sum_over_ranks = SumOverRanks(weights, (self.number,))
        self.window_count = record("window_count", (self.number,))
        self.loss_terms = record("loss_terms", (self.number,))

    def unit(self, inputs, plan, scale):
        """One over the total, for each loss."""
        totals = self.counting.total(inputs, plan)
        if not self.counting.by_samples:
            totals = self.sum_over_ranks.alone(totals)
        totals = ops.depend(totals, ops.assign(self.window_count, totals))
        return counts.ratio_or_zero(scale * ops.ones_like(totals), counts.at_least(totals, self.min_count))

    def zero_sums(self):
        return ops.zeros((self.number,), ms.float32)

    def add_up(self, sums, inputs, plan, unit, prepared):
        """The loop over a batch's micro-batches. An inner loop runs once or not at all: see the rules at the head of
        step.py."""
        start = ms.Tensor(0, ms.int32)
        while start < plan[micro_batches.LOOPED]:
            rows = micro_batches.rows_from(start, plan)
            micro_batch = micro_batches.take(inputs, start, rows, plan[micro_batches.AXES])
            items = self.counting.of(*micro_batch)
            part = self.zero_sums()
            belongs = items > 0
            if self.loss_is_mean:
                seeds = unit * items
                together = belongs.all()
                while together:
                    ran, gradients = self.micro_step.run(seeds, prepared, rows, *micro_batch)
                    part = ops.depend(ran, self.store.add(gradients))
                    together = ms.Tensor(False)
            else:
                seeds = unit
                ran, gradients = self.micro_step.run(seeds, prepared, rows, *micro_batch)
                belongs = ops.logical_or(belongs, ran == ran)
                together = belongs.all()
                while together:
                    part = ops.depend(ran, self.store.add(gradients))
                    together = ms.Tensor(False)
            belongs_alone = ops.unstack(ops.logical_and(belongs, ops.logical_not(belongs.all())))
            for term in range(self.number):
                alone = belongs_alone[term]
                while alone:
                    ran_alone, gradients_alone = self.micro_step.run_alone(term, seeds, *micro_batch)
                    part = part + ops.depend(ran_alone, self.store.add(gradients_alone))
                    alone = ms.Tensor(False)
            sums = sums + part
            start = start + rows
        return sums

    def run_and_add(self, unit, prepared, size, *micro_batch):
        """One micro-batch, outside of a loop."""
        items = self.counting.of(*micro_batch)
        if not self.leaves_out:
            seeds = unit * items if self.loss_is_mean else unit
            sums, gradients = self.micro_step.run(seeds, prepared, size, *micro_batch)
            sums = ops.depend(sums, self.store.add(gradients))
        elif self.loss_is_mean:
            # A mean over no items is NaN, and a zero seed times NaN is NaN: only losses with items go backward.
            seeds, belongs = unit * items, items > 0
            if belongs.all():
                sums, gradients = self.micro_step.run(seeds, prepared, size, *micro_batch)
                sums = ops.depend(sums, self.store.add(gradients))
            else:
                sums = self.each_alone(belongs, seeds, *micro_batch)
        else:
            # A sum over no items is a number, unless it is such a mean times their number.
            sums, gradients = self.micro_step.run(unit, prepared, size, *micro_batch)
            belongs = ops.logical_or(items > 0, sums == sums)
            if belongs.all():
                sums = ops.depend(sums, self.store.add(gradients))
            else:
                sums = self.each_alone(belongs, unit, *micro_batch)
        return sums

    def each_alone(self, belongs, seeds, *micro_batch):
        """Backward for each loss that belongs to the window, one at a time."""
        sums = self.zero_sums()
        belongs_of = ops.unstack(belongs)
        for term in range(self.number):
            if belongs_of[term]:
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
        total = counts.at_least(ops.depend(self.window_count, loss) + 0.0, self.min_count)
        return gradients, scale, loss, ops.logical_and((total >= 0).all(), (total > 0).any())
