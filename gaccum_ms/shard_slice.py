"""One micro-batch of a batch that lies on several devices, without moving a sample between them.

MindSpore's own cell slices the whole batch: its first micro-batch is the first device's samples, so all devices must
gather all samples before each takes its part again. Here each device's own samples are cut, and a micro-batch is one
slice of each: the same samples in other company, which a mean over the batch does not notice.

The compiler's pass finds micro-batches by a `StridedSlice` along axis 0, tagged ``grad_accu_num``. So axis 0, the
samples, is split into (devices, samples of each), and the second of these goes first for the time of the slice.
"""

from __future__ import annotations

from mindspore import nn, ops

from gaccum_ms import auto_parallel


class ShardSlice(nn.Cell):
    """Cut one micro-batch out of an input.

    Args:
        index (int): Which micro-batch.
        micro_size (int): The number of micro-batches.
        strategy (tuple[int, ...]): In how many parts the input's axes lie on the devices. If only axis 0 does, the
            others may be left out, and inputs of any number of axes are cut.

    Inputs:
        - **value** (Tensor) - Shape :math:`(N, ...)`.

    Outputs:
        Tensor of shape :math:`(N / \\text{micro_size}, ...)`.
    """

    def __init__(self, index: int, micro_size: int, strategy: tuple[int, ...]) -> None:
        super().__init__(auto_prefix=False)
        self.index = index
        self.micro_size = micro_size
        self.parts = strategy[0]
        self.keeps_axes = any(parts > 1 for parts in strategy[1:])
        rest = strategy[1:] if self.keeps_axes else (1,)  # what is whole anyway goes as one axis
        by_part, by_sample = (self.parts, 1, *rest), (1, self.parts, *rest)
        self.axes = (1, 0, *range(2, len(rest) + 2))
        self.samples_first = ops.Transpose().shard((by_part,))
        self.slice = ops.StridedSlice().shard((by_sample,))
        self.slice.add_prim_attr("grad_accu_num", micro_size)
        self.parts_first = ops.Transpose().shard((by_sample,))

    def construct(self, value):
        shape = value.shape
        rest = shape[1:] if self.keeps_axes else (_product(shape[1:]),)
        own = shape[0] // self.parts
        auto_parallel.compiled_check_batch([(own,)], self.micro_size)
        size = own // self.micro_size
        parted = self.samples_first(ops.reshape(value, (self.parts, own, *rest)), self.axes)
        begin = (self.index * size, 0, *_zeros(rest))
        end = ((self.index + 1) * size, self.parts, *rest)
        cut = self.slice(parted, begin, end, (1, 1, *_ones(rest)))
        return ops.reshape(self.parts_first(cut, self.axes), (self.parts * size, *shape[1:]))


@ops.constexpr
def _product(lengths):
    product = 1
    for length in lengths:
        product *= length
    return product


@ops.constexpr
def _zeros(lengths):
    return (0,) * len(lengths)


@ops.constexpr
def _ones(lengths):
    return (1,) * len(lengths)
