"""Clipping each element of the finished gradient by itself."""

from __future__ import annotations

import mindspore as ms
from mindspore import ops

from gaccum_ms.checks.arguments import check_finite
from gaccum_ms.transforms.transform import Transform

_clip = ops.MultitypeFuncGraph("gaccum_ms_clip_by_value")


@_clip.register("Tensor", "Tensor", "Tensor")
def _clip_one(low: ms.Tensor, high: ms.Tensor, gradient: ms.Tensor) -> ms.Tensor:
    clipped = ops.minimum(ops.maximum(gradient, low), high)
    return ops.select(ops.isnan(gradient), gradient, clipped)  # on CPU, `ops.maximum` turns NaN into `low`


class ClipByValue(Transform):
    r"""
    Clip each element of the gradients to an interval.

    It applies `mindspore.ops.clip_by_value
    <https://www.mindspore.cn/docs/en/master/api_python/ops/mindspore.ops.clip_by_value.html>`_ to the finished
    gradient. The gradient's direction changes. NaN stays NaN, on CPU too.

    Args:
        max_value (float): The largest value.
        min_value (float, optional): The smallest value. Default: ``None`` , minus `max_value` .

    Inputs:
        - **gradients** (tuple[Tensor]) - The finished gradients, float32.

    Outputs:
        tuple[Tensor], the gradients, clipped.

    Raises:
        TypeError: If a value is not a number.
        ValueError: If a value is not finite, or `min_value` not less than `max_value` .

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import Tensor
        >>> from gaccum_ms import ClipByValue
        >>> (clipped,) = ClipByValue(0.5)((Tensor([3.0, 0.25, -4.0]),))
        >>> print(clipped)
        [ 0.5   0.25 -0.5 ]
    """

    elementwise = True

    def __init__(self, max_value: float, min_value: float | None = None) -> None:
        super().__init__()
        check_finite("ClipByValue", "max_value", max_value)
        low = -max_value if min_value is None else min_value
        check_finite("ClipByValue", "min_value", low)
        if not low < max_value:
            raise ValueError(
                f"For 'ClipByValue', the argument 'min_value' must be less than 'max_value', but got min_value={low} "
                f"and max_value={max_value}. Without 'min_value' give a positive 'max_value'."
            )
        self.low, self.high = ms.Tensor(low, ms.float32), ms.Tensor(max_value, ms.float32)

    def change(self, gradients):
        return ops.HyperMap()(ops.partial(_clip, self.low, self.high), gradients)
