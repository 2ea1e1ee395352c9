"""Reduces gradients over ranks in few large buffers.

Each collective sends a message to every rank, even for little data, so small gradients share a buffer and its message.
A large gradient is sent alone: copying it into a buffer and back costs more than a message, and sharing needs the copy,
because MindSpore allocates each Parameter separately. The number of collectives depends only on the weights, and on the
costs of copies and messages on the device.

For each gradient the result equals that of MindSpore's `nn.DistributedGradReducer`, which it replaces: float32 is sent
for every dtype; ``gradients_mean`` divides by `degree`; a Parameter with ``layerwise_parallel=True`` is this rank's
own, and is not sent. A gradient that is not finite on one rank becomes so on all ranks; other gradients do not.

But the result stays float32. A rank whose batch is one micro-batch has its weights' dtype, and one with accumulators
theirs: rounded to these, the ranks' gradients would differ, and so would their weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import mindspore as ms
from mindspore import nn, ops
from mindspore.communication import GlobalComm

# On CPU. Measured between two processes on two cores: gradients of 4 KB and of 256 KB are fastest in buffers of this
# size, and gradients of 4 MB alone (docs/performance.md).
BUFFER_BYTES = 4 * 2**20
# On other devices, the default of PyTorch's DistributedDataParallel (bucket_cap_mb), which was not measured here.
DEVICE_BUFFER_BYTES = 25 * 2**20
_WIRE_BYTES = 4  # a float32
_MEGABYTE = 2**20

_reshape = ops.Reshape()
_slice = ops.Slice()


def plan_buffers(sizes: Sequence[int], limit: int) -> tuple[tuple[int, ...], ...]:
    """For each buffer, the indices in `sizes` of its members.

    A member of size `limit` or more is alone in its buffer. The others, in the given order, fill one buffer after
    another."""
    alone = [(place,) for place, size in enumerate(sizes) if size >= limit]
    shared: list[tuple[int, ...]] = []
    room = -1
    for place, size in enumerate(sizes):
        if size >= limit:
            continue
        if size > room:
            shared.append(())
            room = limit
        shared[-1] = (*shared[-1], place)
        room -= size
    return (*alone, *shared)


def buffer_bytes() -> int:
    """The largest size of a shared buffer: MindSpore's ``comm_fusion`` , if the user has set a size there. Its mode
    "index" has no size, and is ignored."""
    fusion = ms.get_auto_parallel_context("comm_fusion")
    if not fusion["openstate"]:
        return 0
    of_gradients = fusion["allreduce"]
    if of_gradients["mode"] == "size":
        return of_gradients["config"] * _MEGABYTE
    return BUFFER_BYTES if ms.get_context("device_target") == "CPU" else DEVICE_BUFFER_BYTES


_pick = ops.MultitypeFuncGraph("gaccum_ms_pick")
_flat = ops.MultitypeFuncGraph("gaccum_ms_flat")
_part = ops.MultitypeFuncGraph("gaccum_ms_part")


@_pick.register("Tuple", "Number")
def _pick_one(values, place):
    return values[place]


@_flat.register("Tensor")
def _flat_one(gradient):
    return _reshape(ops.cast(gradient, ms.float32), (-1,))


@_part.register("Tensor", "Number", "Number", "Tensor")
def _part_of(buffer, start, size, gradient):
    return _reshape(_slice(buffer, (start,), (size,)), gradient.shape)


class FusedReducer(nn.Cell):
    """Reduce gradients over ranks, in as few collectives as `buffer_bytes` allows. `mean` : whether to divide the sum
    by `degree` , the number of ranks."""

    def __init__(
        self,
        parameters: Sequence[ms.Parameter],
        mean: bool,
        degree: int,
        group: str = GlobalComm.WORLD_COMM_GROUP,
    ) -> None:
        super().__init__(auto_prefix=False)
        reduced = [place for place, parameter in enumerate(parameters) if not parameter.layerwise_parallel]
        sizes = [parameters[place].size for place in reduced]
        buffers = plan_buffers([size * _WIRE_BYTES for size in sizes], buffer_bytes())
        self.own = tuple(place for place, parameter in enumerate(parameters) if parameter.layerwise_parallel)
        self.alone = tuple(reduced[buffer[0]] for buffer in buffers if len(buffer) == 1)
        self.shared = tuple(tuple(reduced[member] for member in buffer) for buffer in buffers if len(buffer) > 1)
        self.sizes = tuple(tuple(parameters[place].size for place in buffer) for buffer in self.shared)
        self.starts = tuple(tuple(accumulate(sizes, initial=0))[:-1] for sizes in self.sizes)
        # The place of each gradient in the order in which `construct` appends them.
        order = [*self.own, *self.alone, *(place for buffer in self.shared for place in buffer)]
        self.places = tuple(order.index(place) for place in range(len(parameters)))
        self.mean = mean
        self.degree = degree
        self.share = 1.0 / degree
        self.all_reduce = ops.AllReduce(group=group)
        self.concat = ops.Concat()
        self.map = ops.HyperMap()

    # -- compiled: with HyperMap, because graph mode compiles Python loops ten times more slowly -----------------------
    # Each collective waits for the one before: all ranks must have the same order. If their graphs differ, as with a
    # ShardedOptimizer, MindSpore would choose another order on each rank.

    def construct(self, gradients):
        result = self.take(gradients, self.own)
        before = gradients
        for place in self.alone:
            before = self.over_ranks(ops.cast(ops.depend(gradients[place], before), ms.float32))
            result = (*result, before)
        for number in range(len(self.shared)):
            # Copied only now, so that the buffers use the same memory one after another.
            members = ops.depend(self.take(gradients, self.shared[number]), before)
            before = self.over_ranks(self.concat(self.map(_flat, members)))
            parts = self.map(ops.partial(_part, before), self.starts[number], self.sizes[number], members)
            result = result + parts
        return self.take(result, self.places)

    def take(self, values, places):
        return self.map(ops.partial(_pick, values), places)

    def over_ranks(self, buffer):
        summed = self.all_reduce(buffer)
        return summed * self.share if self.mean else summed
