"""How a batch becomes micro-batches, beside a function of one's own: evenly, in the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
        >>> print(net.dense.weight.asnumpy().round(4))
        [[0.9 1.  0.9]]
    """

    shared: Sequence[int] = ()
    axis: int | Sequence[int] = 0

    def __post_init__(self) -> None:
        shared: Any = self.shared
        if not isinstance(shared, (tuple, list)) or any(
            isinstance(position, bool) or not isinstance(position, int) for position in shared
        ):
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
        if any(isinstance(number, bool) or not isinstance(number, int) for number in axes):
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
    return tuple(UNCUT if position in shared else one for position, one in enumerate(axes))


def check_split(owner: str, split: Any) -> None:
    """Refuse what is no way to split a batch."""
    if split is None or isinstance(split, EvenSplit):
        return
    if isinstance(split, type) or not callable(split):
        raise TypeError(
            f"For '{owner}', the argument 'split' must be an EvenSplit, a function that makes of a batch a list of "
            f"micro-batches, or None, but got {split!r}."
        )
