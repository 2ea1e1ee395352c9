r"""The divisor of a window's sums, and what may count it; counts_of_labels.py has the counts of labels.

A network's loss is a mean over some items of its micro-batch: samples, or the items of ``count=`` (valid tokens,
unpadded pixels). If :math:`L_i` is the mean over :math:`c_i` items, the window's loss is
:math:`\sum_i L_i c_i / \sum_i c_i` over all micro-batches and ranks, and so is its gradient. The mean of the
:math:`L_i` differs from it when the :math:`c_i` differ.

Numbers of samples are known from shapes: each micro-batch's share is a constant. Counts are known only at run time, and
their total over ranks only after the reduction, so the last division follows it.
"""

from __future__ import annotations

from collections.abc import Callable

import mindspore as ms
from mindspore import nn, ops
from mindspore.ops.functional import typeof

from gaccum_ms.backend.open_lengths import samples_of

_NAN = float("nan")


class CountMask(nn.Cell):
    r"""
    Count for a loss that is a mean weighted by a mask or by weights: their sum.

    Args:
        position (int): Which of the network's inputs holds the mask. Default: ``-1`` , the last.

    Inputs:
        - **\*inputs** (Tensor) - The network's inputs.

    Outputs:
        Tensor of shape :math:`()`, float32: sum of the mask.

    Raises:
        IndexError: If there is no input number `position` .

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import Tensor
        >>> from gaccum_ms import CountMask
        >>> print(CountMask()(Tensor([[1.0], [2.0], [3.0]]), Tensor([True, False, True])))
        2.0
    """

    def __init__(self, position: int = -1) -> None:
        super().__init__()
        self.position = position

    def construct(self, *inputs):
        return ops.reduce_sum(ops.cast(inputs[self.position], ms.float32))


class CountSamples(nn.Cell):
    """Count for a loss that is a mean over samples. `axis` : that of the samples of the first input."""

    def __init__(self, axis: int = 0) -> None:
        super().__init__()
        self.axis = axis

    def construct(self, *inputs):
        return float32(samples_of(inputs, self.axis))


class CountBy(nn.Cell):
    """Count by a function. It is in a tuple, because graph mode treats a function that is an attribute as a method."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.functions = (function,)

    def construct(self, *inputs):
        return self.functions[0](*inputs)


def count_cell(count: Callable | None, axis: int = 0) -> nn.Cell:
    """The user's count of one loss, as a Cell: in graph mode a tuple's entries must be of one kind."""
    if count is None:
        return CountSamples(axis)
    return count if isinstance(count, nn.Cell) else CountBy(count)


# -- compiled ----------------------------------------------------------------------------------------------------------


def float32(number):
    """An int or Tensor as a float32 Tensor of shape ()."""
    return ops.cast(number, ms.float32) if isinstance(number, ms.Tensor) else ms.Tensor(number, ms.float32)


@ops.constexpr
def _is_number(kind):
    return type(kind).__name__ in ("Int", "UInt", "Float")


@ops.constexpr
def _check_count(kind, shape):
    if shape is None:
        raise TypeError(
            f"For 'GradAccumulationCell', 'count' must return a number or a Tensor of shape (), but got {kind}."
        )
    if shape != ():
        raise ValueError(
            f"For 'GradAccumulationCell', 'count' must return a scalar of shape (), but got shape {shape}. Sum it over "
            f"all axes."
        )


def float32_count(count: ms.Tensor | float) -> ms.Tensor:
    """What a count or the network returned as a float32 Tensor of shape ()."""
    if _is_number(typeof(count)):  # such as the length of an axis
        count = ops.scalar_to_tensor(float(count), ms.float32)
    _check_count(typeof(count), count.shape if isinstance(count, ms.Tensor) else None)
    return ops.cast(count, ms.float32)


def nan_if_bad(numbers: ms.Tensor) -> ms.Tensor:
    """NaN in the place of counts that are negative or infinite. NaN survives sums and collectives, so that all ranks
    refuse the window together."""
    valid = ops.logical_and(numbers >= 0, ops.isfinite(numbers))
    return ops.select(valid, numbers, ms.Tensor(_NAN, ms.float32))


def valid_or_nan(count: ms.Tensor | float) -> ms.Tensor:
    """A count as float32, NaN if it is bad."""
    return nan_if_bad(float32_count(count))


def at_least(total, min_count):
    """The divisor for a total: `min_count` if the total is less. NaN stays, so that a bad count forbids the update."""
    if min_count is None:
        return total
    return ops.select(total < min_count, ops.full_like(total, min_count), total)


def divisor_of(total, min_count):
    """What the sums over a total of items are divided by, and whether there is anything to divide."""
    total = at_least(total, min_count)
    counted = total > 0
    return ops.select(counted, total, ops.ones_like(total)), counted


def quotient_or_zero(counted, divisor, value):
    """``value / divisor``, or zero if nothing was counted."""
    return ops.select(counted, value / divisor, ops.zeros_like(value))


def ratio_or_zero(value, count):
    """``value / count``, or zero if the count is zero."""
    divisor, counted = divisor_of(count, None)
    return quotient_or_zero(counted, divisor, value)


def any_counted(totals, min_count):
    """Whether several losses, each with its own total, have anything to divide by: no count is bad, not all are 0."""
    totals = at_least(totals, min_count)
    return ops.logical_and((totals >= 0).all(), (totals > 0).any())


def one_if_zero(count):
    """The count, or 1 if nothing was counted."""
    return ops.select(count == 0, ops.ones_like(count), count)
