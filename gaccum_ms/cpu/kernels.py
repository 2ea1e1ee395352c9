"""Operations for which MindSpore's CPU back end has a faster kernel than the usual one.

The results are bit-identical, infinities and NaN included; docs/performance.md has the measurements.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import amp, ops

from gaccum_ms.backend.parameters import on_cpu


class _ProximalGradientDescent(ops.ApplyProximalGradientDescent):
    """The kernel, without its constructor's deprecation warning."""

    def __init__(self) -> None:
        ops.Primitive.__init__(self, "ApplyProximalGradientDescent")
        self.add_prim_attr("side_effect_mem", True)


_proximal_gradient_descent = _ProximalGradientDescent()
_times_zero = ops.MultitypeFuncGraph("gaccum_ms_times_zero")

# -- compiled ----------------------------------------------------------------------------------------------------------


def add_in_place(parameter: ms.Parameter, value: ms.Tensor) -> ms.Tensor:
    """``parameter += value`` , both of one dtype; returns a Tensor that depends on the addition.

    AssignAdd adds one number at a time and stores each twice. A step of proximal gradient descent with a rate of -1 and
    no penalty computes the same sum, vectorised. It takes only float32, and no scalars.
    """
    if on_cpu() and parameter.dtype == ms.float32 and parameter.ndim > 0:
        return _proximal_gradient_descent(parameter, -1.0, 0.0, 0.0, value)
    return ops.assign_add(parameter, value)


def zero_in_place(parameter: ms.Parameter) -> ms.Tensor:
    """``parameter = 0`` ; returns a Tensor that depends on the assignment.

    Assign needs zeros of the Parameter's shape, and the compiler would keep them in memory as a constant.
    """
    if on_cpu():
        return parameter.copy_(ms.Tensor(0.0, parameter.dtype))
    return ops.assign(parameter, ops.zeros_like(parameter))


def all_finite(gradients: tuple[ms.Tensor, ...]) -> ms.Tensor:
    """Whether no number in them is infinite or NaN, a bool of shape ``()``.

    `amp.all_finite` tests each number and then combines the results one at a time. Here each number is multiplied by
    zero, which is NaN if it is not finite; NaN survives the sum, which is vectorised by rows.
    """
    if on_cpu() or _in_stages():  # from the tuple in `amp.all_finite` , another stage's gradients are not removed
        return ops.addn(ops.HyperMap()(_times_zero, gradients)) == 0
    return amp.all_finite(gradients)


@ops.constexpr
def _in_stages():
    return ms.get_auto_parallel_context("pipeline_stages") > 1


@_times_zero.register("Tensor")
def _times_zero_of_one(gradient: ms.Tensor) -> ms.Tensor:
    if gradient.dtype != ms.float64:  # large float64 numbers would become infinite
        gradient = ops.cast(gradient, ms.float32)
    zeros = gradient * 0.0
    if gradient.ndim > 1:
        zeros = ops.reduce_sum(zeros.reshape((gradient.shape[0], -1)), 1)
    return ops.cast(ops.reduce_sum(zeros), ms.float32)
