"""Accumulators: how the gradients of a window are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mindspore as ms

from gaccum_ms.checks.arguments import check_bool, check_one_of, described

_NAME = "Accumulators"


@dataclass(frozen=True)
class Accumulators:
    r"""
    How the gradients of a window are kept while they add up: the `accumulators` of a :class:`GradAccumulationCell` or
    :class:`GradAccumulator` .

    Args:
        dtype (mindspore.dtype, optional): float32, float16 or bfloat16; ``None`` gives each accumulator the dtype of
            its weight. In windows of several batches, sums are scaled by the first batch's count; float16 overflows if
            a later batch counts thousands of times more. Default: ``mindspore.float32`` .
        compensated (bool, optional): Sum with Kahan's compensation, which keeps the rounding error of each accumulator
            in a float32 Parameter. Default: ``False`` .

    Raises:
        TypeError: If `compensated` is not a bool.
        ValueError: If `dtype` is none of these.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from gaccum_ms import Accumulators, GradAccumulationCell
        >>> network = nn.WithLossCell(nn.Dense(3, 1), nn.MSELoss())
        >>> cell = GradAccumulationCell(network, 4, accumulators=Accumulators(ms.bfloat16, compensated=True))
    """

    dtype: ms.Type | None = ms.float32
    compensated: bool = False

    def __post_init__(self) -> None:
        check_one_of(_NAME, "dtype", self.dtype, (ms.float32, ms.float16, ms.bfloat16, None))
        check_bool(_NAME, "compensated", self.compensated)

    def __deepcopy__(self, memo: dict[int, Any]) -> Accumulators:
        return self  # a copy of MindSpore's dtype is another dtype


def check_accumulators(owner: str, name: str, value: Any) -> None:
    if not isinstance(value, Accumulators):
        raise TypeError(
            f"For '{owner}', the argument '{name}' must be gaccum_ms.Accumulators(...), but got {described(value)}."
        )
