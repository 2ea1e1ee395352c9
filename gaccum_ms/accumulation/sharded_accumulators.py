"""Sharded accumulators: each rank keeps its slice, and the gradients of each micro-batch are reduced over ranks.

This is the gradients' part of ZeRO stage 2 (Rajbhandari et al., 2020, arXiv:1910.02054). All ranks must add equally
often, and multiples of the same seed, because each addition goes into all ranks' accumulators.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.accumulation.accumulators import GradientSums, NoSums
from gaccum_ms.accumulation.micro_batches import SplitPlan
from gaccum_ms.backend import no_grad
from gaccum_ms.distributed.layout import Layout, rank_and_ranks
from gaccum_ms.options.options import Options

# Followed by the weight's name. They differ from the whole accumulators' prefixes: neither may be loaded as the other.
PARTS = "accu_grads_part."
COMPENSATION_PARTS = "accu_compensation_part."
ALL_PARTS = (PARTS, COMPENSATION_PARTS)


class ShardedSums(GradientSums):
    """The methods of `GradientSums` , with sums over ranks. `mean` : whether ranks are averaged, not summed."""

    reduces = True

    def __init__(self, weights: Sequence[ms.Parameter], dtype: ms.Type | None, compensated: bool, mean: bool) -> None:
        rank, ranks = rank_and_ranks()
        like = [SimpleNamespace(shape=weight.shape, dtype=ms.float32) for weight in weights]
        layout = Layout(like, (None,) * len(like), rank, ranks)
        rows = [
            SimpleNamespace(name=weight.name, shape=(1, columns), dtype=weight.dtype)
            for weight, columns in zip(weights, layout.columns, strict=True)
        ]
        super().__init__(rows, dtype, compensated, PARTS, COMPENSATION_PARTS)
        self.layout = layout
        self.factor = 1 / ranks if mean else 1.0

    # -- compiled ------------------------------------------------------------------------------------------------------

    def add(self, gradients):
        parts: tuple = ()
        for part in self.layout.own_of_sum(gradients):
            parts = (*parts, part * self.factor)
        return super().add(parts)

    def read(self, after):
        """The whole sums over all ranks, once `after` is computed. A collective."""
        return self.layout.whole(super().read(after))

    # -- not compiled --------------------------------------------------------------------------------------------------

    def check_plan(self, plan: SplitPlan) -> None:
        """Check, before a batch, that all ranks have as many micro-batches. A collective. If not, all raise."""
        number = -(-plan.samples // plan.size)
        with no_grad():
            numbers = ops.AllGather()(ms.Tensor([number], ms.int32)).asnumpy().tolist()
        if any(other != number for other in numbers):
            raise ValueError(
                f"For 'GradAccumulationCell', with Accumulators(sharded=True) all ranks must have the same number of "
                f"micro-batches in a batch, because each is reduced over all of them, but got {numbers} of the ranks. "
                f"Nothing was added. Give all ranks batches of the same size, or leave 'sharded' out."
            )


def store_of(options: Options, weights: ms.ParameterTuple, accumulates: bool, sums: bool) -> nn.Cell:
    """Where a window's gradients are added up. `sums` : ranks are summed, also with ``gradients_mean=True`` ."""
    if not accumulates:
        return NoSums()
    form = options.accumulators.dtype, options.accumulators.compensated
    if options.accumulators.sharded and rank_and_ranks()[1] > 1:
        means = not sums and ms.get_auto_parallel_context("gradients_mean")
        return ShardedSums(weights, *form, means)
    return GradientSums(weights, *form)
