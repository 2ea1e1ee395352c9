"""How a batch becomes micro-batches, beside a function of one's own: evenly. This file has the option, and where Python
knows the boundaries to be; micro_batches.py has the graph's part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import ops

from gaccum_ms.backend import no_grad

UNCUT = -1  # in place of an axis: the input is shared


@dataclass(frozen=True)
class EvenSplit:
    r"""
    Split each batch into micro-batches that are as equal as one shape allows, along axis 0, as
    :class:`GradAccumulationCell` does where nothing is given as its `split` .

    Args:
        shared (Sequence[int], optional): The positions of inputs that are no samples: a mask, a table, a number. All
            micro-batches get them whole; they may have any shape, :math:`()` too. Not 0: the first input says how
            many samples there are. Default: ``()`` , all inputs are split. An input that is not named here is split,
            even if it has as many rows as there are samples by chance.
        axis (Union[int, Sequence[int]], optional): The axis that counts samples, of all inputs or of each: 1 for
            sequences of shape :math:`(T, N, ...)`, the default of `nn.GRU` and `nn.LSTM` . The number of samples is
            its length. For an input that is shared, the entry has no meaning. Default: ``0`` .

    Raises:
        TypeError: If `shared` is not a tuple or list of ints, or `axis` neither an int nor one.
        ValueError: If a position is less than 1, or an axis less than 0.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from gaccum_ms import EvenSplit, GradAccumulationCell, TrainOneStepWithGradAccumulationCell
        >>> class Masked(nn.Cell):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.dense = nn.Dense(3, 1, weight_init="ones", bias_init="zeros")
        ...     def construct(self, x, mask):
        ...         return self.dense(x * mask).mean()
        >>> net = Masked()
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
        >>> cell = GradAccumulationCell(net, 4, split=EvenSplit(shared=(1,)))
        >>> step = TrainOneStepWithGradAccumulationCell(cell, optimizer).set_train()
        >>> loss = step(Tensor(np.ones((8, 3), np.float32)), Tensor(np.array([1, 0, 1], np.float32)))
        >>> print(loss)
        2.0
    """

    shared: Sequence[int] = ()
    axis: int | Sequence[int] = 0

    def __post_init__(self) -> None:
        shared: Any = self.shared
        if not isinstance(shared, (tuple, list)) or not all(type(position) is int for position in shared):
            raise TypeError(
                f"For 'EvenSplit', the argument 'shared' must be a tuple of ints, the positions of inputs, but got "
                f"{shared!r}."
            )
        if any(position < 1 for position in shared):
            raise ValueError(
                f"For 'EvenSplit', the argument 'shared' must have positions from 1 on, because the first input, "
                f"number 0, says how many samples there are, but got {shared!r}. Give an input of samples first."
            )
        object.__setattr__(self, "shared", tuple(sorted(set(shared))))
        axis: Any = self.axis
        axes = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
        if not all(type(number) is int for number in axes):
            raise TypeError(
                f"For 'EvenSplit', the argument 'axis' must be an int, the axis of samples, or a tuple with one for "
                f"each input, but got {axis!r}."
            )
        if any(number < 0 for number in axes):
            raise ValueError(
                f"For 'EvenSplit', the argument 'axis' must count axes from 0 on, but got {axis!r}. Inputs without an "
                f"axis of samples are named by 'shared'."
            )
        object.__setattr__(self, "axis", axes if isinstance(axis, (tuple, list)) else axis)


def cut_axes(inputs: int, shared: tuple[int, ...], axis: int | tuple[int, ...]) -> tuple[int, ...]:
    """The axis of samples of each input, or `UNCUT` . `inputs` : their number."""
    axes = (axis,) * inputs if isinstance(axis, int) else axis
    return tuple(UNCUT if position in shared else each for position, each in enumerate(axes))


class SplitPlan(NamedTuple):
    """How one batch is cut: ``full`` micro-batches of ``size`` samples, then one of ``rest`` samples if not 0. It is
    smaller, or one sample larger."""

    samples: int
    size: int
    full: int
    rest: int


def plan_split(
    shapes: Any,
    micro_size: int | None,
    micro_batch_size: int | None,
    shared: tuple[int, ...] = (),
    axis: int | tuple[int, ...] = 0,
    least: int = 1,
) -> SplitPlan:
    """Where a batch with inputs of these shapes is cut. `micro_batch_size` is used if `micro_size` is None. With
    `least` 2, no micro-batch of one sample is left, unless `micro_batch_size` is 1 or the batch has one sample."""
    if not shapes:
        raise ValueError("For 'GradAccumulationCell', a batch must have at least one input, but got none.")
    samples = _samples_in(shapes, shared, axis)
    if micro_size is not None:
        size = max(-(-samples // micro_size), min(least, samples))
    else:
        size = min(micro_batch_size or samples, samples)
    full, rest = divmod(samples, size)
    if rest == 1 < least:
        full, rest = full - 1, size + 1
    return SplitPlan(samples, size, full, rest) if full else SplitPlan(samples, samples, 1, 0)


def _samples_in(shapes: Any, shared: tuple[int, ...], axis: int | tuple[int, ...]) -> int:
    """The number of samples of a batch, which is checked."""
    if max(shared, default=0) >= len(shapes):
        raise ValueError(
            f"For 'GradAccumulationCell', 'split' must share inputs that the batch has, but got "
            f"EvenSplit(shared={shared}) and a batch of {len(shapes)} input(s)."
        )
    if not isinstance(axis, int) and len(axis) != len(shapes):
        raise ValueError(
            f"For 'GradAccumulationCell', 'split' must have one axis for all inputs, or one for each, but got "
            f"EvenSplit(axis={axis}) and a batch of {len(shapes)} input(s)."
        )
    lengths: dict[int, int] = {}
    for position, cut in enumerate(cut_axes(len(shapes), shared, axis)):
        if cut >= len(shapes[position]):
            raise ValueError(
                f"For 'GradAccumulationCell', every input must have an axis {cut} that counts samples, but input "
                f"{position} got shape {tuple(shapes[position])}. {_if_shared(shared, [position])}"
            )
        if cut != UNCUT:
            lengths[position] = shapes[position][cut]
    samples = lengths[0]
    others = [position for position, length in lengths.items() if length != samples]
    if others:
        where = f"axis {axis}" if isinstance(axis, int) else f"the axes {axis}"
        raise ValueError(
            f"For 'GradAccumulationCell', {where} of all inputs must have the same length, because all are split at "
            f"the same boundaries, but got shapes {[tuple(shape) for shape in shapes]}. {_if_shared(shared, others)} "
            f"If samples are on another axis, EvenSplit(axis=...) names it."
        )
    if samples < 1:
        raise ValueError(f"For 'GradAccumulationCell', a batch must not be empty, but got shapes {list(shapes)}.")
    return samples


def _if_shared(shared: tuple[int, ...], positions: list[int]) -> str:
    if 0 in positions:
        return "The first input must have samples: give such an input first."
    others = tuple(sorted({*shared, *positions}))
    return f"What all samples share is given to each micro-batch whole by split=EvenSplit(shared={others})."


def cut(inputs: Sequence[ms.Tensor], plan: SplitPlan, axes: Sequence[int]) -> list[list[ms.Tensor]]:
    """The micro-batches of a batch, outside of a graph. `axes` : the axis of samples of each input, or `UNCUT` ."""
    starts = [plan.size * number for number in range(plan.full + (plan.rest > 0))]
    return [
        [value if axis == UNCUT else value[between(start, end, axis)] for value, axis in zip(inputs, axes, strict=True)]
        for start, end in zip(starts, [*starts[1:], plan.samples], strict=True)
    ]


def rows_of(inputs: Sequence[Any], axes: Sequence[int], places: Any) -> list[Any]:
    """Samples of a batch by their places, outside of a graph. `axes` : as in `cut` ."""
    index = ms.Tensor(np.asarray(places, np.int32))
    with no_grad():
        return [
            value if axis == UNCUT else ops.gather(value, index, axis) for value, axis in zip(inputs, axes, strict=True)
        ]


def between(start: int, end: int, axis: int) -> tuple[slice, ...]:
    """The index of these samples of an input."""
    return (*[slice(None)] * axis, slice(start, end))
