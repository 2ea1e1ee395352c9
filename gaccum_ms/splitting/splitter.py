"""What the training asks of an object that splits batches in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms

from gaccum_ms.splitting.auto_size import AutoSize
from gaccum_ms.splitting.even_split import EvenSplit
from gaccum_ms.splitting.token_plan import TokenPlan

MicroBatches = list[tuple[ms.Tensor, ...]]


class Splitter:
    """Makes micro-batches of a batch. What is written here holds for a plain function, of which nothing is known but
    the micro-batches that it returns."""

    auto: AutoSize | None = None  # the search for the size of micro-batches, if there is one
    trims = False  # whether micro-batches are rows of the batch, and rows of padding, which must weigh nothing
    joins = True  # whether the network's outputs are joined; of a trial they are of no use
    plan: TokenPlan | None = None  # the layout of the last batch

    def __call__(self, *batch: Any) -> Any:
        """The micro-batches, each a tuple of Tensors."""
        raise NotImplementedError

    def working_copy(self) -> Splitter:
        """What one training step splits by: what it learns from its batches is not in the user's object, which other
        steps may have too."""
        return self

    def check_padding(self, counted: Callable[..., Sequence[tuple[str, float]]]) -> None:
        """Check, after a batch was split, that rows without a sample count nothing. `counted` : a function of the
        inputs of such a row, which returns names and numbers that must be 0."""


class OfFunction(Splitter):
    """A function that makes micro-batches of a batch."""

    def __init__(self, function: Callable) -> None:
        self._function = function

    def __call__(self, *batch: Any) -> Any:
        return self._function(*batch)

    def __repr__(self) -> str:
        return repr(self._function)


def splitter_of(split: Any) -> Any:
    """A splitter in place of a function; everything else as it is."""
    is_function = callable(split) and not isinstance(split, (Splitter, type))
    return OfFunction(split) if is_function else split


def check_split(owner: str, name: str, split: Any) -> None:
    """Refuse what is no way to split a batch."""
    if split is not None and not isinstance(split, (EvenSplit, Splitter)):
        raise TypeError(
            f"For '{owner}', the argument '{name}' must be an EvenSplit, a function that makes of a batch a list of "
            f"micro-batches, or None, but got {split!r}."
        )
