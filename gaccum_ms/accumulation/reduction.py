"""The mean over all counted items of all ranks, in one reduction.

Each rank has a sum of gradients, a sum of losses, and their count. One reduction adds all of them over ranks; the sums
are then divided by the total count. The mean of the ranks' means would differ from it when the counts differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.accumulation.noise import SUMS as NOISE_SUMS
from gaccum_ms.accumulation.noise import NoiseRecord
from gaccum_ms.accumulation.sums import COUNT, DROPPED, LOSS, SUMS
from gaccum_ms.backend.parameters import record
from gaccum_ms.distributed.ranks import SumOverRanks
from gaccum_ms.losses import counts
from gaccum_ms.transforms.norms import scale_by


class CountedReduction(nn.Cell):
    """Reduce gradients, together with the sums ``(loss, count, dropped micro-batches)``, over all ranks.

    `by_samples` : the counts are samples, and not the user's own; MindSpore's ``gradients_mean`` then decides between
    mean and sum over ranks, and each rank reports its own loss, as without accumulation. `is_mean` : whether to divide
    by the count; not for a loss that is a sum and has no count. `position` : the batches so far, if windows have
    several."""

    def __init__(
        self,
        weights: Sequence[ms.Parameter],
        by_samples: bool,
        is_mean: bool = True,
        min_count: float | None = None,
        records_noise: bool = False,
        position: ms.Parameter | None = None,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.by_samples = by_samples
        self.is_mean = is_mean
        self.min_count = min_count
        self.map = ops.HyperMap()
        self.records_noise = records_noise
        # With `min_count` a window of no items is an update, but not the flush of a window that no rank has begun.
        self.counts_batches = min_count is not None and position is not None
        if self.counts_batches:
            self.window_position = position
        self.noise_from = SUMS + self.counts_batches
        self.size = self.noise_from + NOISE_SUMS * records_noise
        self.sum_over_ranks = SumOverRanks(weights, (self.size,))
        self.factor = self.sum_over_ranks.summed_ranks() if by_samples else 1.0
        if records_noise:
            self.noise = NoiseRecord(None, self.factor)
        self.ranks = self.sum_over_ranks.ranks
        self.window_count = record("window_count")
        self.dropped_micro_batches = record("dropped_micro_batches")

    def construct(self, gradients, sums, unit, scale):
        """Gradients and loss are multiples of `unit` , this rank's own. Returns the gradients' sums times the
        loss scale, their divisor, the loss, and whether there is anything to divide by."""
        # Zero if this rank has counted nothing: it then has no unit.
        rescale = counts.ratio_or_zero(scale, unit)
        sums = sums * ops.stack((rescale, ops.ones_like(rescale), ops.ones_like(rescale)))
        if self.counts_batches:
            batches = ops.cast(ops.depend(self.window_position, sums), ms.float32)
            sums = ops.concat((sums, batches.reshape((1,))))
        if self.records_noise:
            sums = ops.concat((sums, ops.depend(self.noise.window_squares, sums) + 0.0))
        gradients = self.map(ops.partial(scale_by, rescale), gradients)
        gradients, over_ranks = self.sum_over_ranks(gradients, sums)
        all_sums = ops.unstack(over_ranks[:SUMS])
        total, dropped = all_sums[COUNT], all_sums[DROPPED]
        reported = ops.unstack((sums if self.by_samples else over_ranks)[:SUMS])
        loss, count = reported[LOSS], counts.at_least(reported[COUNT], self.min_count)
        least = counts.at_least(total, self.min_count)
        if self.counts_batches:
            least = ops.select(ops.unstack(over_ranks)[SUMS] > 0, least, ops.zeros_like(least))
        divisor = ops.select(least > 0, least, ops.ones_like(least)) * scale / self.factor
        if not self.is_mean:
            count = ops.ones_like(count)
            divisor = scale * self.ranks / self.factor
        loss = counts.ratio_or_zero(loss / scale, count)
        loss = ops.depend(loss, ops.assign(self.window_count, total))
        loss = ops.depend(loss, ops.assign(self.dropped_micro_batches, dropped))
        if self.records_noise:
            # A sum that is divided by more than its items is no mean, from which no noise is known.
            items = ops.select(least > total, ops.zeros_like(total), total)
            loss = ops.depend(loss, self.noise.keep(over_ranks[self.noise_from :], items))
        return gradients, divisor, loss, least > 0
