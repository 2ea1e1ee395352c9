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

from gaccum_ms.accumulation.counting import Counting
from gaccum_ms.backend.parameters import record
from gaccum_ms.distributed.ranks import SumOverRanks
from gaccum_ms.losses import counts

if TYPE_CHECKING:
    from gaccum_ms.accumulation.weighing import MadeOf


class ByCountsOfEach(nn.Cell):
    """Several losses, each divided by its own total. `sums` : each loss's part of its mean."""

    may_skip = True
    needs_division = False
    weighs_samples = False
    runs_all = False

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
            # A mean over no items is NaN, and a zero seed times NaN is NaN. So backward runs for each loss with items.
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
