"""How a batch becomes micro-batches, beside a function of one's own: evenly, in the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EvenSplit:
    r"""
    Split each batch along axis 0 into micro-batches that are as equal as one shape allows, as
    :class:`GradAccumulationCell` does where nothing is given as its `split` .

    Args:
        shared (Sequence[int], optional): The positions of inputs that are no samples: a mask, a table, a number. All
            micro-batches get them whole; they may have any shape, :math:`()` too. Not 0: the first input says how
            many samples there are. Default: ``()`` , all inputs are split.

    Raises:
        TypeError: If `shared` is not a tuple or list of ints.
        ValueError: If a position is less than 1.

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


def check_split(owner: str, split: Any) -> None:
    """Refuse what is no way to split a batch."""
    if split is None or isinstance(split, EvenSplit):
        return
    if isinstance(split, type) or not callable(split):
        raise TypeError(
            f"For '{owner}', the argument 'split' must be an EvenSplit, a function that makes of a batch a list of "
            f"micro-batches, or None, but got {split!r}."
        )
