"""One micro-batch of a batch that lies on several devices, without moving a sample between them.

MindSpore's own cell slices the whole batch: its first micro-batch is the first device's samples, so all devices must
gather all samples before each takes its part again. Here each device's own samples are cut, and a micro-batch is one
slice of each: the same samples in other company, which a mean over the batch does not notice.

The compiler's pass finds micro-batches by a `StridedSlice` along axis 0, tagged ``grad_accu_num``. So axis 0, the
samples, is split into (devices, samples of each), and the second of these goes first for the time of the slice.
"""

from __future__ import annotations

import math

from mindspore import nn, ops

from gaccum_ms.semi_auto import modes as auto_parallel


class ShardSlice(nn.Cell):
    """Cut one micro-batch out of an input.

    Args:
        index (int): Which micro-batch.
        micro_size (int): The number of micro-batches.
        parts (int): In how many parts the samples lie on the devices.

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
        # All other axes go as one, for inputs of any number of axes.
        self.samples_first = ops.Transpose().shard(((parts, 1, 1),))
        self.slice = ops.StridedSlice().shard(((1, parts, 1),)).add_prim_attr("grad_accu_num", micro_size)
        self.parts_first = ops.Transpose().shard(((1, parts, 1),))

    def construct(self, value):
        shape = value.shape
        own, features = _per_part(shape, self.parts)
        auto_parallel.compiled_check_batch([(own,)], self.micro_size)
        size = own // self.micro_size
        parted = self.samples_first(ops.reshape(value, (self.parts, own, features)), (1, 0, 2))
        begin, end = (self.index * size, 0, 0), ((self.index + 1) * size, self.parts, features)
        cut = self.slice(parted, begin, end, (1, 1, 1))
        return ops.reshape(self.parts_first(cut, (1, 0, 2)), (self.parts * size, *shape[1:]))


@ops.constexpr
def _per_part(shape, parts):
    """Samples in each part, and numbers in each sample."""
    return shape[0] // parts, math.prod(shape[1:])
