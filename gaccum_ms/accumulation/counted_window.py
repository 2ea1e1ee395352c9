"""A window whose micro-batches weigh by counts, which only the data tell.

The rank's own micro-batches are counted first, and seeded with their shares. reduction.py then makes the mean
over all ranks.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.accumulation import micro_batches
from gaccum_ms.accumulation.reduction import CountedReduction
from gaccum_ms.accumulation.window import SampleWindow
from gaccum_ms.backend.cpu_kernels import all_finite
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.losses import counts


class CountedWindow(SampleWindow):
    """Micro-batches weigh by counts, and may be left out. `sums`: the loss, the count, how many were dropped."""

    gated = True
    divides = True

    def __init__(self, cell: GradAccumulationCell, weights: ms.ParameterTuple, grad_reducer: nn.Cell) -> None:
        super().__init__(cell, weights, grad_reducer)
        self.counts = nn.CellList([counts.count_cell(count) for count in cell.counts], auto_prefix=False)
        self.counts_samples = all(count is None for count in cell.counts)
        self.drops = cell.overflow == "drop_micro_batch"
        self.count_shape = (len(cell.loss_weights),) if cell.several_losses else ()
        if not cell.several_losses:
            # A sum without a count, allowed in windows that span batches, is not divided by anything.
            self.is_mean = self.loss_is_mean or not self.counts_samples
            self.reduction = CountedReduction(
                weights, self.counts_samples, self.is_mean, self.shards, self.records_noise
            )
            if self.records_noise:
                self.noise = self.reduction.noise
            self.window_count = self.reduction.window_count
            self.dropped_micro_batches = self.reduction.dropped_micro_batches

    def unit(self, inputs, samples, scale):
        """One over this rank's own total: what goes backward, and into the accumulators, is then as small as the whole
        batch's, and overflows in low precision no sooner. `reduce` multiplies by it again."""
        total = self.own_total(inputs)
        if self.shards:
            total = self.reduction.mean_over_ranks(total)
        return scale / ops.select(total > 0, total, ops.ones_like(total))

    def own_total(self, inputs):
        """The counts of this rank's batch. Each micro-batch is counted: a bad count must not hide in the others'."""
        samples, size, looped, rest, _ = micro_batches.graph_plan(inputs, self.micro_size, self.micro_batch_size)
        total = ops.zeros(self.count_shape, ms.float32)
        if self.counts_samples:
            return total + samples
        start = ms.Tensor(0, ms.int32)
        while start < looped:
            rows = micro_batches.rows_from(start, size, looped)
            total = total + self.count_all(*micro_batches.take(inputs, start, rows))
            start = start + rows
        if rest > 0:
            total = total + self.count_all(*micro_batches.take_rest(inputs, looped))
        return total

    def nothing(self):
        return ms.Tensor([0.0, 0.0, 0.0], ms.float32)

    def count_all(self, *micro_batch):
        return self.count(0, *micro_batch)

    def count(self, term, *micro_batch):
        return counts.valid_or_nan(self.counts[term](*micro_batch))

    def micro_step(self, noted, unit, size, *micro_batch):
        count = self.count_all(*micro_batch)
        # A mean over nothing is NaN, and so is its gradient: such a micro-batch is not run at all. Not so a NaN count,
        # which must reach the total.
        sums = ops.stack((ops.zeros_like(count), count, ops.zeros_like(count)))
        if self.shards:
            sums = self.reduced_step(unit * self.items(count), count, *micro_batch)
        elif count > 0:
            sums = self.counted_step(noted, unit, count, *micro_batch)
        return sums

    def reduced_step(self, seed, count, *micro_batch):
        """Adds in any case: the other ranks, which may count something, wait for it."""
        seeded_loss = ops.zeros_like(count)
        gradients = self.map(ops.zeros_like, self.weights)
        if count > 0:
            seeded_loss, gradients = self.backward(seed, *micro_batch)
        return ops.depend(ops.stack((seeded_loss, count, ops.zeros_like(count))), self.add(gradients))

    def counted_step(self, noted, unit, count, *micro_batch):
        seeded_loss, gradients = self.backward(unit * self.items(count), *micro_batch)
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
            sums = ops.depend(sums, self.note(gradients, unit, count))
        return ops.depend(sums, self.add(gradients))

    def reduce(self, gradients, sums, scale, unit):
        return self.reduction(gradients, sums, unit, scale)
