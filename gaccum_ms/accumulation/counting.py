"""The count of a micro-batch before it runs: the result of `count` , or its number of samples."""

from __future__ import annotations

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.losses import counts
from gaccum_ms.options.options import Options
from gaccum_ms.splitting import micro_batches


class Counting(nn.Cell):
    """The count of a micro-batch: one number, or with several losses one for each loss."""

    def __init__(self, options: Options) -> None:
        super().__init__(auto_prefix=False)
        self.counts = nn.CellList(
            [counts.count_cell(count, options.first_axis) for count in options.counts], auto_prefix=False
        )
        self.by_samples = options.own_count is None
        self.number = options.losses
        self.several = options.several_losses
        self.shape = (self.number,) if self.several else ()

    def of(self, *micro_batch):
        if self.several:
            items: tuple = ()
            for term in range(self.number):
                items = (*items, self.of_term(term, *micro_batch))
            return ops.stack(items)
        return self.of_term(0, *micro_batch)

    def of_term(self, term, *micro_batch):
        return counts.valid_or_nan(self.counts[term](*micro_batch))

    def total(self, inputs, plan):
        """The counts of this rank's batch. Each micro-batch is counted separately, so that a bad count is noticed."""
        total = ops.zeros(self.shape, ms.float32)
        if self.by_samples:
            return total + plan[micro_batches.SAMPLES]
        return micro_batches.add_up(self.count_rows, (), (), total, inputs, plan)

    def count_rows(self, of_loop, rows, *micro_batch):
        return self.of(*micro_batch)
