"""The accumulators: one Parameter for each weight, in which the gradients of a window add up."""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
from mindspore import ops
from mindspore.common.initializer import initializer

PREFIX = "accu_grads."


def allocate(weights: Sequence[ms.Parameter], dtype: ms.Type) -> ms.ParameterTuple:
    """Zero accumulators named after their weights (``accu_grads.<weight>``), not trainable."""
    return ms.ParameterTuple(
        [
            ms.Parameter(
                initializer("zeros", weight.shape, dtype),
                name=PREFIX + weight.name,
                requires_grad=False,
                layerwise_parallel=weight.layerwise_parallel,
            )
            for weight in weights
        ]
    )


# Side effects in a compiled graph are ordered by the framework for reads and writes of one Parameter, and by
# ops.depend where the order must hold between several: callers use the returned values for that.

add = ops.MultitypeFuncGraph("gaccum_ms_add")
clear = ops.MultitypeFuncGraph("gaccum_ms_clear")


@add.register("Tensor", "Tensor")
def _add(accumulator: ms.Parameter, gradient: ms.Tensor) -> ms.Tensor:
    return ops.assign_add(accumulator, ops.cast(gradient, accumulator.dtype))


@clear.register("Tensor")
def _clear(accumulator: ms.Parameter) -> ms.Tensor:
    return ops.assign(accumulator, ops.zeros_like(accumulator))
