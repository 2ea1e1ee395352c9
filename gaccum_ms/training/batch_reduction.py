"""The reduction of a GradAccumulator's windows, whose batches weigh by counts, by samples or all alike, or are sums."""

from __future__ import annotations

import mindspore as ms
from mindspore import ops

from gaccum_ms.accumulation.reduction import CountedReduction
from gaccum_ms.record.run_record import RULES
from gaccum_ms.transforms.norms import scale_by

BATCHES, SAMPLES, COUNTS, SUMS = (RULES.index(rule) for rule in ("batches", "samples", "counts", "sums"))


class BatchReduction(CountedReduction):
    """Without counts, and with ``gradients_mean=False`` , ranks are summed: the mean times the number of ranks.

    The window's end multiplies, as in the step: the window may have begun on another number of ranks. A sum without
    counts is divided by nothing, as in the step.
    """

    window_rule: ms.Parameter
    may_stay_sum = False  # set before anything is compiled

    def __init__(self, weights: ms.ParameterTuple, min_count: float | None, position: ms.Parameter) -> None:
        super().__init__(weights, by_samples=False, min_count=min_count, position=position)
        self.summed_ranks = self.sum_over_ranks.summed_ranks()

    # -- compiled ------------------------------------------------------------------------------------------------------

    def weighed(self, gradients, weight):
        """The gradients of a batch, as its window adds them."""
        return self.map(ops.partial(scale_by, weight), gradients)

    def construct(self, gradients, sums, unit, scale):
        gradients, divisor, loss, counted = super().construct(gradients, sums, unit, scale)
        if self.summed_ranks != 1.0:
            divisor = ops.select(self.window_rule == COUNTS, divisor, divisor / self.summed_ranks)
        if self.may_stay_sum:
            is_sum = self.window_rule == SUMS
            divisor = ops.select(is_sum, scale * (self.ranks / self.summed_ranks), divisor)
            loss = ops.select(is_sum, loss * (ops.depend(self.window_count, loss) + 0.0), loss)
        return gradients, divisor, loss, counted
