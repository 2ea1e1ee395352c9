"""A window of several losses, each divided by its own total.

One accumulator cannot be divided by several totals, and one for each loss would cost a backward for each. So the totals
come first: the micro-batches are counted, and the counts summed over ranks, before the loop; each loss is then seeded
with its share. Where all counts are samples there is nothing to ask other ranks, and `gradients_mean` says what ranks
mean together.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.accumulation.counted_window import CountedWindow
from gaccum_ms.accumulation.window import float32_losses
from gaccum_ms.backend.parameters import record
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.distributed.ranks import SumOverRanks
from gaccum_ms.losses import counts


class _LossAlone(nn.Cell):
    """One of several losses: a graph of its own, which the others' NaN cannot enter."""

    def __init__(self, network: nn.Cell, term: int, loss_weights: tuple[float, ...]) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.term = term
        self.weight = loss_weights[term]
        self.number = len(loss_weights)
        self.place = ms.Tensor([float(other == term) for other in range(self.number)], ms.float32)

    def construct(self, seeds, *micro_batch):
        part = float32_losses(self.network(*micro_batch), self.number)[self.term] * ops.unstack(seeds)[self.term]
        return part * self.weight, part * self.place


class MultiLossWindow(CountedWindow):
    """Several losses, each divided by its own total. `sums`: each loss's part of its mean."""

    divides = False

    def __init__(self, cell: GradAccumulationCell, weights: ms.ParameterTuple, grad_reducer: nn.Cell) -> None:
        self.number = len(cell.loss_weights)
        super().__init__(cell, weights, grad_reducer)
        self.loss_weights = ms.Tensor(cell.loss_weights, ms.float32)
        self.backward = ops.value_and_grad(self.seeded_losses, None, weights, has_aux=True)
        alone = [_LossAlone(cell.network, term, cell.loss_weights) for term in range(self.number)]
        self.backward_of = tuple(ops.value_and_grad(one, None, weights, has_aux=True) for one in alone)
        self.sum_over_ranks = SumOverRanks(weights, (self.number,))
        self.window_count = record("window_count", (self.number,))
        self.loss_terms = record("loss_terms", (self.number,))

    def unit(self, inputs, samples, scale):
        """One over the total, for each loss."""
        totals = self.own_total(inputs)
        if not self.counts_samples:
            totals = self.sum_over_ranks.alone(totals)
        totals = ops.depend(totals, ops.assign(self.window_count, totals))
        return counts.ratio_or_zero(scale * ops.ones_like(totals), totals)

    def nothing(self):
        return ops.zeros((self.number,), ms.float32)

    def count_all(self, *micro_batch):
        return ops.stack([self.count(term, *micro_batch) for term in range(self.number)])

    def micro_step(self, noted, unit, size, *micro_batch):
        counts = self.count_all(*micro_batch)
        seeds = unit * self.items(counts)
        sums = self.nothing()
        if (counts > 0).all():
            (_, sums), gradients = self.backward(seeds, *micro_batch)
            sums = ops.depend(sums, self.add(gradients))
        else:
            # A mean over nothing is NaN, and a zero seed times NaN is NaN: each loss that has items goes back alone.
            count_of = ops.unstack(counts)
            for term in range(self.number):
                if count_of[term] > 0:
                    (_, part), gradients = self.backward_of[term](seeds, *micro_batch)
                    sums = sums + ops.depend(part, self.add(gradients))
        return sums

    def seeded_losses(self, seeds, *micro_batch):
        """The sum that goes backward, and each loss's part of its window mean."""
        parts = ops.stack(float32_losses(self.network(*micro_batch), self.number)) * seeds
        return ops.reduce_sum(parts * self.loss_weights), parts

    def reduce(self, gradients, sums, scale, unit):
        if self.counts_samples:
            gradients = self.grad_reducer(gradients)
        else:
            gradients, sums = self.sum_over_ranks(gradients, sums)
        terms = sums / scale
        loss = ops.reduce_sum(terms * self.loss_weights)
        loss = ops.depend(loss, ops.assign(self.loss_terms, terms))
        total = ops.depend(self.window_count, loss)
        return gradients, scale, loss, ops.logical_and((total >= 0).all(), (total > 0).any())
