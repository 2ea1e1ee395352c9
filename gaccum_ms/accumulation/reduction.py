"""The mean over all counted items of all ranks, in one reduction.

Each rank has sums: of gradients, of the loss, and the count that they are over. They leave for the other ranks
together; what comes back is divided by the total of all. The mean of the ranks' means would be something else as soon
as their counts differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.accumulation.noise import SUMS as NOISE_SUMS
from gaccum_ms.accumulation.noise import NoiseRecord
from gaccum_ms.backend.parameters import record
from gaccum_ms.distributed.ranks import SumOverRanks
from gaccum_ms.losses import counts

SUMS = 3  # of losses, counts and dropped micro-batches

scale_by = ops.MultitypeFuncGraph("gaccum_ms_scale_by")


@scale_by.register("Tensor", "Tensor")
def _scale_one(factor, gradient):
    return ops.cast(gradient, ms.float32) * factor


class CountedReduction(nn.Cell):
    """Reduce gradients, together with the sums ``(loss, count, dropped micro-batches)``, over all ranks.

    Args:
        weights (Sequence[Parameter]): The weights whose gradients are reduced.
        by_samples (bool): Whether the counts are not the user's own. Ranks then mean together what MindSpore's
            ``gradients_mean`` says, and a rank reports its own loss, as without accumulation.
        is_mean (bool): Whether to divide by the count at all: not a loss that is a sum, and has none.
        reduced (bool): Whether gradients are sums over all ranks already, which then have a unit in common.
        records_noise (bool): Whether there are sums for estimates of the gradient noise too.
        position (Parameter or None): As of `NoiseRecord` .
    """

    def __init__(
        self,
        weights: Sequence[ms.Parameter],
        by_samples: bool,
        is_mean: bool = True,
        reduced: bool = False,
        records_noise: bool = False,
        position: ms.Parameter | None = None,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.by_samples = by_samples
        self.is_mean = is_mean
        self.reduced = reduced
        self.map = ops.HyperMap()
        self.records_noise = records_noise
        self.size = SUMS + NOISE_SUMS * records_noise
        self.sum_over_ranks = SumOverRanks(weights, (self.size,))
        self.factor = self.sum_over_ranks.summed_ranks() if by_samples else 1.0
        if records_noise:
            self.noise = NoiseRecord(None, self.factor, position)
        self.ranks = self.sum_over_ranks.ranks
        self.window_count = record("window_count")
        self.dropped_micro_batches = record("dropped_micro_batches")

    def construct(self, gradients, sums, unit, scale):
        """Gradients and loss come as multiples of `unit`, this rank's own. Returns the gradients' sums, times the loss
        scale, what they are to be divided by, the loss, and whether anything was counted."""
        # Zero where this rank has counted nothing: it has no unit then.
        per_unit = counts.ratio_or_zero(scale, unit)
        sums = sums * ops.stack((per_unit, ops.ones_like(per_unit), ops.ones_like(per_unit)))
        if self.records_noise:
            sums = ops.concat((sums, ops.depend(self.noise.window_first, sums) + 0.0))
        gradients = self.map(ops.partial(scale_by, per_unit), gradients)
        if self.reduced:
            # After the gradients' gathering, for the same order on all ranks.
            over_ranks = self.sum_over_ranks.alone(ops.depend(sums, gradients))
        else:
            gradients, over_ranks = self.sum_over_ranks(gradients, sums)
        _, total, dropped = ops.unstack(over_ranks[:SUMS])
        loss, count, _ = ops.unstack((sums if self.by_samples else over_ranks)[:SUMS])
        divisor = ops.select(total > 0, total, ops.ones_like(total)) * scale / self.factor
        if not self.is_mean:
            count = ops.ones_like(count)
            divisor = scale * self.ranks / self.factor
        loss = counts.ratio_or_zero(loss / scale, count)
        loss = ops.depend(loss, ops.assign(self.window_count, total))
        loss = ops.depend(loss, ops.assign(self.dropped_micro_batches, dropped))
        if self.records_noise:
            loss = ops.depend(loss, self.noise.keep(over_ranks[SUMS:], total))
        return gradients, divisor, loss, total > 0

    def mean_over_ranks(self, count):
        """Of each rank's count: what a unit that ranks have in common is made of."""
        only = ops.concat((count.reshape((1,)), ops.zeros((self.size - 1,), ms.float32)))
        return ops.unstack(self.sum_over_ranks.alone(only))[0] / self.ranks
