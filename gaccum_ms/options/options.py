"""The options of accumulation, as one immutable value. compatibility.py decides which of them go together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import numpy as np

from gaccum_ms.backend.out_of_memory import check_test
from gaccum_ms.checks.arguments import (
    check_accumulation_options,
    check_bool,
    check_one_of,
    check_positive_finite,
    check_positive_int,
    check_transforms,
)
from gaccum_ms.splitting.even_split import EvenSplit
from gaccum_ms.splitting.splitter import check_split, splitter_of

_NAME = "GradAccumulationCell"


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of :class:`GradAccumulationCell` besides the network, under the same names. A
    :class:`GradAccumulator` has those of them that do not concern how a batch is cut and weighted."""

    micro_size: int | None = None
    micro_batch_size: int | str | None = None
    accumulation_steps: Any = 1  # int, once it is checked; None: not given
    reduction: str = "mean"
    count: Callable | Sequence[Callable | None] | None = None
    min_count: float | None = None
    loss_weights: Any = (1.0,)  # Sequence[float], once it is checked
    max_grad_norm: float | None = None
    transforms: Any = ()  # tuple[Transform | Callable, ...], once it is checked
    accumulator_dtype: ms.Type | None = ms.float32
    compensated: bool = False
    overflow: str = "drop_window"
    shard_accumulators: bool = False
    record_noise: bool = False
    aux: bool = False
    memory_limit: int | None = None
    is_out_of_memory: Callable[[BaseException], bool] | None = None
    jit: bool | None = None
    split: Any = None  # EvenSplit | Splitter | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "split", splitter_of(self.split))

    @property
    def shared(self) -> tuple[int, ...]:
        """The positions of inputs that are not cut."""
        return tuple(self.split.shared) if isinstance(self.split, EvenSplit) else ()

    @property
    def axis(self) -> Any:
        """The axis of samples: an int for all inputs, or a tuple with one for each."""
        return self.split.axis if isinstance(self.split, EvenSplit) else 0

    @property
    def first_axis(self) -> int:
        """The axis of samples of the first input."""
        return self.axis if isinstance(self.axis, int) else self.axis[0]

    @property
    def splits_in_python(self) -> bool:
        """Whether a function makes the micro-batches."""
        return self.split is not None and not isinstance(self.split, EvenSplit)

    @property
    def trims(self) -> bool:
        """Whether that function only leaves padding out, so that the batch may be trained whole, too."""
        return self.splits_in_python and self.split.keeps_inputs

    @property
    def finds_tokens(self) -> bool:
        """Whether the training step is to find how many tokens that function puts into a micro-batch."""
        return self.splits_in_python and self.split.auto is not None

    @property
    def losses(self) -> int:
        """The number of losses that the network returns."""
        return len(self.loss_weights or ())

    @property
    def counts(self) -> tuple[Callable | None, ...]:
        """One count for each loss; None: samples."""
        count: Any = self.count
        if count is None:
            return (None,) * self.losses
        return tuple(count) if isinstance(count, (tuple, list)) else (count,)

    @property
    def own_count(self) -> Callable | None:
        """The first count that is not None, which would count samples."""
        return next((count for count in self.counts if count is not None), None)

    @property
    def finds_size(self) -> bool:
        """Whether the training step finds the number of samples in a micro-batch."""
        return self.micro_batch_size == "auto"

    @property
    def searches(self) -> bool:
        """Whether the training step is to find the size of micro-batches, in samples or tokens."""
        return self.finds_size or self.finds_tokens

    @property
    def returns_ratio(self) -> bool:
        """Whether the network returns a sum and the number of its items."""
        return self.reduction == "ratio"

    @property
    def counts_items(self) -> bool:
        """Whether the user gives the weights of micro-batches, by `count` or in the network."""
        return self.own_count is not None or self.returns_ratio

    @property
    def counted(self) -> bool:
        """Whether the weights of micro-batches depend on the data, and not only on their samples."""
        return self.counts_items or self.drops

    @property
    def drops(self) -> bool:
        """Whether micro-batches that overflow are left out."""
        return self.overflow == "drop_micro_batch"

    @property
    def several_losses(self) -> bool:
        """Whether losses must be weighted: not for one loss with weight 1."""
        return self.loss_weights != (1.0,)

    @property
    def loss_is_mean(self) -> bool:
        """Whether the network's loss is a mean over its items."""
        return self.reduction == "mean"

    @property
    def accumulates(self) -> bool:
        """Whether there is anything to accumulate: not with one micro-batch that is never left out."""
        return self.micro_size != 1 or self.accumulation_steps > 1 or self.counted or self.several_losses


def checked(given: Options) -> Options:
    """The user's options, each checked by itself and normalised.

    Raises:
        TypeError: If one is of a wrong type.
        ValueError: If one has a wrong value; if both sizes are given or neither; if there are not as many counts as
            losses.
    """
    given = _of_python(given)
    if given.accumulation_steps is not None:
        check_positive_int(_NAME, "accumulation_steps", given.accumulation_steps)
    check_split(_NAME, given.split)
    micro_size = _checked_sizes(given)
    check_accumulation_options(
        _NAME, given.max_grad_norm, given.accumulator_dtype, given.compensated, given.overflow, given.jit
    )
    check_one_of(_NAME, "reduction", given.reduction, ("mean", "sum", "ratio"))
    if given.min_count is not None:
        check_positive_finite(_NAME, "min_count", given.min_count)
    weights = _loss_weights(given.count, given.loss_weights)
    transforms = check_transforms(_NAME, given.transforms)
    for name in ("shard_accumulators", "record_noise", "aux"):
        check_bool(_NAME, name, getattr(given, name))
    if given.searches:
        if given.memory_limit is not None:
            check_positive_int(_NAME, "memory_limit", given.memory_limit)
        check_test(_NAME, given.is_out_of_memory)
    return dataclasses.replace(
        given,
        micro_size=micro_size,
        accumulation_steps=given.accumulation_steps or 1,
        transforms=transforms,
        loss_weights=weights,
    )


def _of_python(given: Options) -> Options:
    """NumPy's numbers become Python's, which a graph can hold."""
    arrays = {name: value.item() for name, value in vars(given).items() if isinstance(value, np.generic)}
    return dataclasses.replace(given, **arrays)


def _checked_sizes(given: Options) -> int | None:
    """The number of micro-batches; None: another option decides."""
    micro_size, micro_batch_size = given.micro_size, given.micro_batch_size
    if given.splits_in_python:
        if micro_size is not None or micro_batch_size is not None:
            raise ValueError(
                f"For '{_NAME}', with a function as 'split', which makes the micro-batches, neither 'micro_size' nor "
                f"'micro_batch_size' must be given, but got micro_size={micro_size} and "
                f"micro_batch_size={micro_batch_size}. Leave both out, or the function."
            )
        return None
    if micro_size is None and micro_batch_size is None and given.accumulation_steps is not None:
        micro_size = 1
    if (micro_size is None) == (micro_batch_size is None):
        raise ValueError(
            f"For '{_NAME}', exactly one of 'micro_size' (number of micro-batches) and 'micro_batch_size' (samples in "
            f"one) must be given, or neither with 'accumulation_steps' (batches that share an update), but got "
            f"micro_size={given.micro_size}, micro_batch_size={given.micro_batch_size} and "
            f"accumulation_steps={given.accumulation_steps}."
        )
    for name, value in (("micro_size", micro_size), ("micro_batch_size", micro_batch_size)):
        if value is not None and (name, value) != ("micro_batch_size", "auto"):
            check_positive_int(_NAME, name, value)
    return micro_size


def _loss_weights(count: Any, loss_weights: Any) -> tuple[float, ...]:
    """One weight for each loss of the network."""
    several = isinstance(count, (tuple, list))
    counts = tuple(count) if several else (count,)
    for one in counts:
        if one is not None and not callable(one):
            raise TypeError(
                f"For '{_NAME}', the argument 'count' must be a function or Cell that maps the network's inputs to a "
                f"number of items, or one for each loss, but got {one!r}."
            )
    if loss_weights is None:
        loss_weights = (1.0,) * len(counts)
    if not isinstance(loss_weights, (tuple, list)) or any(
        isinstance(weight, bool) or not isinstance(weight, (int, float)) for weight in loss_weights
    ):
        raise TypeError(
            f"For '{_NAME}', the argument 'loss_weights' must be a sequence of floats, but got {loss_weights!r}."
        )
    if not loss_weights or not all(math.isfinite(weight) for weight in loss_weights):
        raise ValueError(
            f"For '{_NAME}', the argument 'loss_weights' must be finite, one for each loss, but got {loss_weights!r}."
        )
    if count is not None and len(counts) != len(loss_weights):
        raise ValueError(
            f"For '{_NAME}', 'count' and 'loss_weights' must have one entry for each loss, but got {len(counts)} "
            f"count(s) and {len(loss_weights)} weight(s)."
        )
    return tuple(float(weight) for weight in loss_weights)
