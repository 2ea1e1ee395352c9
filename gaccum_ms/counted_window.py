"""A window whose micro-batches weigh by counts: sums go through the loop, and are divided when the total is known.

The counts are summed over ranks together with the gradients, in the window's one reduction.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import amp, nn, ops

from gaccum_ms import normalize
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.parallel import SumOverRanks
from gaccum_ms.window import SampleWindow, record

to_float32 = ops.MultitypeFuncGraph("gaccum_ms_to_float32")


@to_float32.register("Tensor")
def _to_float32_one(gradient):
    return ops.cast(gradient, ms.float32)


class CountedWindow(SampleWindow):
    """Micro-batches weigh by counts, and may be left out. `sums`: the loss, the count, how many were dropped."""

    gated = True
    divides = True

    def __init__(self, cell: GradAccumulationCell, weights: ms.ParameterTuple, grad_reducer: nn.Cell) -> None:
        super().__init__(cell, weights, grad_reducer)
        self.counts = nn.CellList([normalize.count_cell(count) for count in cell.counts], auto_prefix=False)
        self.counts_samples = all(count is None for count in cell.counts)
        self.drops = cell.overflow == "drop_micro_batch"
        self.sum_over_ranks = SumOverRanks(weights, self.nothing().shape)
        # Without counts of the user's own, ranks mean together what MindSpore's 'gradients_mean' says.
        self.factor = self.sum_over_ranks.summed_ranks() if self.counts_samples else 1.0
        self.window_count = record("window_count", self.count_shape(cell))
        self.dropped_micro_batches = record("dropped_micro_batches")

    @staticmethod
    def count_shape(cell: GradAccumulationCell) -> tuple[int, ...]:
        return ()

    def unit(self, inputs, samples, scale):
        return scale

    def nothing(self):
        return ms.Tensor([0.0, 0.0, 0.0], ms.float32)

    def count(self, term, *micro_batch):
        return normalize.valid_or_nan(self.counts[term](*micro_batch))

    def micro_step(self, unit, size, *micro_batch):
        count = self.count(0, *micro_batch)
        # A mean over nothing is NaN, and so is its gradient: such a micro-batch is not run at all. Not so a NaN count,
        # which must reach the total.
        sums = ops.stack((ops.zeros_like(count), count, ops.zeros_like(count)))
        if count > 0:
            sums = self.counted_step(unit * self.items(count), count, *micro_batch)
        return sums

    def counted_step(self, seed, count, *micro_batch):
        seeded_loss, gradients = self.backward(seed, *micro_batch)
        sums = ops.stack((seeded_loss, count, ops.zeros_like(count)))
        if self.drops:
            if ops.logical_and(amp.all_finite(gradients), ops.isfinite(seeded_loss)):
                sums = ops.depend(sums, self.add(gradients))
            else:
                sums = ms.Tensor([0.0, 0.0, 1.0], ms.float32)
        else:
            sums = ops.depend(sums, self.add(gradients))
        return sums

    def reduce(self, gradients, sums, scale):
        gradients, over_ranks = self.sum_over_ranks(self.map(to_float32, gradients), sums)
        total = over_ranks[1]
        # The loss of samples is the rank's own, as without accumulation; that of counted items is all ranks'.
        own = sums if self.counts_samples else over_ranks
        loss = normalize.mean_or_zero(own[0] / scale, own[1])
        loss = ops.depend(loss, ops.assign(self.window_count, total))
        loss = ops.depend(loss, ops.assign(self.dropped_micro_batches, over_ranks[2]))
        divisor = ops.select(total > 0, total, ops.ones_like(total)) * scale / self.factor
        return gradients, divisor, loss, total > 0
