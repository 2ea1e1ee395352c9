"""Global norms of gradients, and clipping by them. Only the finished gradient, reduced over ranks, is clipped.

Clipping each micro-batch would be wrong: the norm of a mean is not the mean of the norms.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import ops

from gaccum_ms.distributed.ranks import compiler_distributes

_are_parts = ops.constexpr(compiler_distributes)  # whether a gradient is one device's part alone
# In semi-auto parallel mode a gradient is one device's part. At this tag, set by `mindspore.ops.clip_by_global_norm`
# too, the compiler sums the squares over devices; in other modes it has no effect.
_tagged = ops.ExpandDims().add_prim_attr("grad_scale", True)

_square_sums = ops.MultitypeFuncGraph("gaccum_ms_square_sums")
_square_sum_of_part = ops.MultitypeFuncGraph("gaccum_ms_square_sum_of_part")
scale_by = ops.MultitypeFuncGraph("gaccum_ms_scale_by")


@_square_sums.register("Tensor")
def _square_sums_of_one(gradient: ms.Tensor) -> ms.Tensor:
    gradient = ops.cast(gradient, ms.float32)
    squares = gradient * gradient  # MindSpore's Square takes twice as long on CPU
    if gradient.ndim > 1:  # row by row: MindSpore's CPU kernel is eight times slower for all axes at once
        return ops.reduce_sum(squares.reshape((gradient.shape[0], -1)), 1)
    return squares.reshape((-1,))


@_square_sum_of_part.register("Tensor")
def _square_sum_of_one_part(gradient: ms.Tensor) -> ms.Tensor:
    return _tagged(ops.reduce_sum(ops.square(ops.cast(gradient, ms.float32))), 0)


@scale_by.register("Number", "Tensor")
@scale_by.register("Tensor", "Tensor")
def _scale_one(factor: ms.Tensor, gradient: ms.Tensor) -> ms.Tensor:
    return ops.cast(gradient, ms.float32) * factor


def global_norm(gradients: tuple[ms.Tensor, ...]) -> ms.Tensor:
    """The Euclidean norm of all gradients together, wherever their parts lie; float32, shape ``()``."""
    if _are_parts():  # no reshape of gradients: for them, the compiler would gather
        return ops.reshape(ops.sqrt(ops.addn(ops.HyperMap()(_square_sum_of_part, gradients))), ())
    return ops.sqrt(square_norm(gradients))


def square_norm(gradients: tuple[ms.Tensor, ...]) -> ms.Tensor:
    """The square of their global norm, where each is whole."""
    return ops.reduce_sum(ops.concat(ops.HyperMap()(_square_sums, gradients)))


def clip_by_norm(gradients: tuple[ms.Tensor, ...], norm: ms.Tensor, max_norm: float) -> tuple[ms.Tensor, ...]:
    """The gradients, scaled down to global norm `max_norm` if `norm` , their own norm, is larger; float32."""
    return ops.HyperMap()(ops.partial(scale_by, clipping_factor(norm, max_norm)), gradients)


def clipping_factor(norm, largest):
    """The factor that makes a norm the largest one: exactly one if it is not larger, NaN if it is NaN."""
    # Not by `ops.maximum` , whose kernel on CPU takes the other number for NaN, outside of graphs.
    return ops.select(norm <= largest, ops.ones_like(norm), largest / norm)
