"""A window that spans several batches: how one batch is added. What stays between batches is in open_window.py."""

from __future__ import annotations

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.accumulation.counted_window import CountedWindow
from gaccum_ms.accumulation.open_window import OpenWindow
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.losses.counts import ratio_or_zero


class SpanningWindow(CountedWindow):
    """Micro-batches weigh by samples or counts, over all batches of the window and all ranks."""

    spans_batches = True

    def __init__(
        self,
        cell: GradAccumulationCell,
        weights: ms.ParameterTuple,
        grad_reducer: nn.Cell,
        position: ms.Parameter,
    ) -> None:
        super().__init__(cell, weights, grad_reducer)
        self.open = OpenWindow(
            "GradAccumulationCell", self.accumulators, self.reduction, position, cell.accumulation_steps
        )

    # -- compiled ------------------------------------------------------------------------------------------------------

    def add_batch(self, inputs, scale):
        """Forward, backward and add for one batch; returns its own mean loss, on this rank."""
        count = self.own_total(inputs)
        expected = self.reduction.mean_over_ranks(count) if self.shards else count
        unit = self.open.begin_batch(scale, expected)
        sums = self.nothing()
        if self.counts_samples or expected >= 0:  # a bad count is NaN here: such a batch is left out as a whole
            sums = self.add_up(inputs, unit)
        loss, kept = ops.unstack(sums[:2])
        mean = ratio_or_zero(loss, unit * kept if self.is_mean else unit)
        return ops.depend(mean, self.open.end_batch(sums, count))

    def note(self, gradients, unit, items):
        noted = items
        if ops.depend(self.open.window_position, unit) + 0 == 1:
            noted = ops.depend(items, super().note(gradients, unit, items))
        return noted

    # -- not compiled --------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """After a batch that failed; one that was refused before it ran has left the window as it was."""
        self.open.drop_if_torn()
