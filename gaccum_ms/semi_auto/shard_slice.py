"""Cuts one micro-batch out of a batch on several devices, without moving samples between devices.

MindSpore's own cell slices the whole batch: its first micro-batch is the first device's samples, so all devices must
gather all samples before each takes its part again. Here each device cuts its own samples, and a micro-batch is one
slice from each device. Samples are grouped differently, but the mean over the batch is the same.

The compiler's pass finds micro-batches by a `StridedSlice` along axis 0, tagged ``grad_accu_num``. So axis 0, the
samples, is split into (devices, samples of each), and the two axes are swapped around the slice.
"""

from __future__ import annotations

import math

from mindspore import nn, ops

from gaccum_ms.semi_auto import modes as auto_parallel


class ShardSlice(nn.Cell):
    """Cut one micro-batch out of an input.

    Args:
        index (int): The micro-batch's number.
        micro_size (int): The number of micro-batches.
        parts (int): The number of parts into which the devices split the samples.

    Inputs:
        - **value** (Tensor) - Shape :math:`(N, ...)`.

    Outputs:
        Tensor of shape :math:`(N / \\text{micro_size}, ...)`.
    """

    def __init__(self, index: int, micro_size: int, parts: int) -> None:
        super().__init__(auto_prefix=False)
        self.index = index
        self.micro_size = micro_size
        self.parts = parts
        # All other axes are merged into one, so that inputs may have any number of axes.
        self.samples_first = ops.Transpose().shard(((parts, 1, 1),))
        self.slice = ops.StridedSlice().shard(((1, parts, 1),)).add_prim_attr("grad_accu_num", micro_size)
        self.parts_first = ops.Transpose().shard(((1, parts, 1),))

    def construct(self, value):
        shape = value.shape
        own, features = per_part(shape, self.parts, self.micro_size)
        size = own // self.micro_size
        parted = self.samples_first(ops.reshape(value, (self.parts, own, features)), (1, 0, 2))
        begin, end = (self.index * size, 0, 0), ((self.index + 1) * size, self.parts, features)
        cut = self.slice(parted, begin, end, (1, 1, 1))
        return ops.reshape(self.parts_first(cut, (1, 0, 2)), (self.parts * size, *shape[1:]))


class ShardSlices(nn.Cell):
    """Cut all micro-batches out of an input, each by a :class:`ShardSlice` ."""

    def __init__(self, micro_size: int, parts: int) -> None:
        super().__init__(auto_prefix=False)
        slices = [ShardSlice(index, micro_size, parts) for index in range(micro_size)]
        self.slices = nn.CellList(slices, auto_prefix=False)

    def construct(self, value):
        micro_batches: tuple = ()
        for cut in self.slices:
            micro_batches = (*micro_batches, cut(value))
        return micro_batches


@ops.constexpr
def per_part(shape, parts, micro_size):
    """Samples in each part, and numbers in each sample. Refuses what cannot be cut: with data sinking, no Python of the
    step runs before."""
    own = shape[0] // parts
    auto_parallel.check_batch([(own,)], micro_size)
    return own, math.prod(shape[1:])
