"""Gradients leave for the other ranks in few large buffers, not each on its own.

A collective costs a message to every rank, however little it carries: small gradients share a buffer, and with it the
message. A large one goes alone, because to copy it into a buffer and back costs more than a message; without a copy
none can share, because MindSpore gives each Parameter memory of its own. How many collectives there are depends on the
weights alone, and on the device, by what copies and messages cost there.

For each gradient the result is that of MindSpore's `nn.DistributedGradReducer`, whose place it takes: float32 goes over
the wire, whatever the gradient's dtype; ``gradients_mean`` divides by `degree`; a Parameter with
``layerwise_parallel=True`` is this rank's own, and stays here. What is not finite spreads to this gradient on all
ranks, and to no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import mindspore as ms
from mindspore import nn, ops
from mindspore.communication import GlobalComm

# On CPU. Between two processes on two cores, gradients of 4 KB and of 256 KB go fastest in buffers of this size, and
# gradients of 4 MB alone: `python -m benchmarks.collectives`.
BUFFER_BYTES = 4 * 2**20
# Elsewhere, as PyTorch's DistributedDataParallel (bucket_cap_mb). Assumed, not measured: a byte in a shared buffer is
# read and written twice, at 1.5 TB/s; a message takes 30 microseconds within a host, and four times that between
# hosts. Then a buffer is cheaper than messages for gradients up to 10 MB within a host, and up to 40 MB between hosts.
DEVICE_BUFFER_BYTES = 25 * 2**20
_WIRE_BYTES = 4  # of a float32
_MEGABYTE = 2**20

_reshape = ops.Reshape()
_slice = ops.Slice()


def plan_buffers(sizes: Sequence[int], limit: int) -> tuple[tuple[int, ...], ...]:
    """Who travels together: for each buffer the places, in `sizes` , of what it holds.

    What has `limit` or more is alone in its buffer. The others, in the order given, fill one buffer after the other.

    Args:
        sizes (Sequence[int]): How large each is.
        limit (int): How large a shared buffer may be, in the unit of `sizes` .

    Returns:
        tuple[tuple[int, ...], ...], the places.
    """
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
    """How large a shared buffer may be: what MindSpore's ``comm_fusion`` says, if the user has set a size. Its mode by
    indices of parameters says nothing here."""
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
    return ops.cast(_reshape(_slice(buffer, (start,), (size,)), gradient.shape), gradient.dtype)


class FusedReducer(nn.Cell):
    """Reduce gradients over ranks, in as few collectives as `buffer_bytes` allows.

    Args:
        parameters (Sequence[Parameter]): What the gradients are of.
        mean (bool): Whether to divide the sum by `degree` .
        degree (int): The number of ranks.
        group (str): Which ranks. Default: all.

    Inputs:
        - **gradients** (tuple[Tensor]) - One of the shape of each Parameter.

    Outputs:
        tuple[Tensor], the reduced gradients, in shape, dtype and order of those given.
    """

    def __init__(
        self,
        parameters: Sequence[ms.Parameter],
        mean: bool,
        degree: int,
        group: str = GlobalComm.WORLD_COMM_GROUP,
    ) -> None:
        super().__init__(auto_prefix=False)
        reduced = [place for place, one in enumerate(parameters) if not one.layerwise_parallel]
        sizes = [parameters[place].size for place in reduced]
        buffers = plan_buffers([size * _WIRE_BYTES for size in sizes], buffer_bytes())
        self.own = tuple(place for place, one in enumerate(parameters) if one.layerwise_parallel)
        self.alone = tuple(reduced[buffer[0]] for buffer in buffers if len(buffer) == 1)
        self.shared = tuple(tuple(reduced[one] for one in buffer) for buffer in buffers if len(buffer) > 1)
        self.sizes = tuple(tuple(parameters[place].size for place in buffer) for buffer in self.shared)
        self.starts = tuple(tuple(accumulate(sizes, initial=0))[:-1] for sizes in self.sizes)
        # Where each gradient is in what `construct` puts one after the other.
        order = [*self.own, *self.alone, *(place for buffer in self.shared for place in buffer)]
        self.places = tuple(order.index(place) for place in range(len(parameters)))
        self.mean = mean
        self.degree = degree
        self.share = 1.0 / degree
        self.all_reduce = ops.AllReduce(group=group)
        self.concat = ops.Concat()
        self.map = ops.HyperMap()

    # -- compiled: by HyperMap, since graph mode takes ten times as long for Python's own loops ------------------------
    # Each collective waits for the one before: all ranks must have the same order, and where their graphs differ, as a
    # ShardedOptimizer's do, MindSpore would take another one on each.

    def construct(self, gradients):
        result = self.take(gradients, self.own)
        before = gradients
        for place in self.alone:
            before = self.reduce_alone(ops.depend(gradients[place], before))
            result = (*result, before)
        for number in range(len(self.shared)):
            # Copied no sooner, so that one buffer's memory is the next one's.
            members = ops.depend(self.take(gradients, self.shared[number]), before)
            before = self.over_ranks(self.concat(self.map(_flat, members)))
            parts = self.map(ops.partial(_part, before), self.starts[number], self.sizes[number], members)
            result = result + parts
        return self.take(result, self.places)

    def take(self, values, places):
        return self.map(ops.partial(_pick, values), places)

    def reduce_alone(self, gradient):
        return ops.cast(self.over_ranks(ops.cast(gradient, ms.float32)), gradient.dtype)

    def over_ranks(self, buffer):
        summed = self.all_reduce(buffer)
        return summed * self.share if self.mean else summed
