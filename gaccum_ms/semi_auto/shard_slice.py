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
from gaccum_ms.semi_auto.operators import each, reshape


class ShardSlices(nn.Cell):
    """Cut all micro-batches out of an input of shape (N, ...), whose samples the devices split into `shards` ."""

    def __init__(self, micro_size: int, shards: int) -> None:
        super().__init__(auto_prefix=False)
        self.micro_size = micro_size
        self.shards = shards
        # All other axes are merged into one, so that inputs may have any number of axes.
        self.samples_first = ops.Transpose().shard(((shards, 1, 1),))
        self.slice = ops.StridedSlice().shard(((1, shards, 1),)).add_prim_attr("grad_accu_num", micro_size)
        self.shards_first = ops.Transpose().shard(((1, shards, 1),))

    def construct(self, value):
        whole, begins, ends, shape = plan_of_slices(value.shape, self.shards, self.micro_size)
        parted = self.samples_first(reshape(value, whole), (1, 0, 2))
        return each(ops.partial(self.cut, parted, whole[2], shape), begins, ends)

    def cut(self, parted, numbers, shape, begin, end):
        """The micro-batch of samples `begin` to `end` of each part; `numbers` : of a sample."""
        own = self.slice(parted, (begin, 0, 0), (end, self.shards, numbers), (1, 1, 1))
        return reshape(self.shards_first(own, (1, 0, 2)), shape)


@ops.constexpr
def plan_of_slices(shape, shards, micro_size):
    """The shape of an input by shards, (shards, samples of each, numbers of a sample); the samples of each shard at
    which the micro-batches begin, and those at which they end; and a micro-batch's shape. Refuses what cannot be cut:
    with data sinking, no Python of the step runs before."""
    own = shape[0] // shards
    auto_parallel.check_batch([(own,)], micro_size)
    size = own // micro_size
    begins = tuple(range(0, own, size))
    ends = tuple(range(size, own + 1, size))
    return (shards, own, math.prod(shape[1:])), begins, ends, (shards * size, *shape[1:])
