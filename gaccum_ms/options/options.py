"""The options of accumulation, each once: its default and its check. The signature and docstring of
`GradAccumulationCell` are compared with this. compatibility.py has what does not go together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gaccum_ms.checks.arguments import (
    check_bool,
    check_count,
    check_loss_weights,
    check_positive,
    check_positive_finite,
    check_positive_int,
    check_transforms,
    one_of,
    optional,
)
from gaccum_ms.options.accumulators import Accumulators, check_accumulators
from gaccum_ms.splitting.auto_size import AutoSize, auto_size_of, check_micro_batch_size
from gaccum_ms.splitting.even_split import EvenSplit
from gaccum_ms.splitting.splitter import check_split, splitter_of


def option(check: Callable[[str, str, Any], None], default: Any = None) -> Any:
    """The field of an option. `check` : of the class in errors, the option's name, and its value."""
    return dataclasses.field(default=default, metadata={"check": check})


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of :class:`GradAccumulationCell` besides the network, under the same names. A
    :class:`GradAccumulator` has those of them that do not concern how a batch is cut and weighted."""

    micro_size: int | None = option(optional(check_positive_int))
    micro_batch_size: Any = option(check_micro_batch_size)
    accumulation_steps: Any = option(optional(check_positive_int))
    reduction: str | None = option(optional(one_of("mean", "sum", "ratio")))
    count: Callable | Sequence[Callable | None] | None = option(check_count)
    min_count: float | None = option(optional(check_positive_finite))
    loss_weights: Any = option(check_loss_weights)
    max_grad_norm: float | None = option(optional(check_positive))
    transforms: Any = option(check_transforms, default=())
    accumulators: Any = option(check_accumulators)
    overflow: str = option(one_of("drop_window", "drop_micro_batch"), default="drop_window")
    record_noise: bool = option(check_bool, default=False)
    aux: bool = option(check_bool, default=False)
    jit: bool | None = option(optional(check_bool))
    split: Any = option(check_split)
    check: str | None = option(optional(one_of("first_batch")), default="first_batch")

    def __post_init__(self) -> None:
        """Short forms become what they stand for, and NumPy's numbers Python's, which a graph can hold."""
        for name, value in vars(self).items():
            if isinstance(value, np.generic):
                object.__setattr__(self, name, value.item())
        object.__setattr__(self, "micro_batch_size", auto_size_of(self.micro_batch_size))
        object.__setattr__(self, "split", splitter_of(self.split))
        if self.accumulators is None:
            object.__setattr__(self, "accumulators", Accumulators())

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
        return self.splits_in_python and self.split.trims

    @property
    def auto(self) -> AutoSize | None:
        """The search for the size of micro-batches, in samples or tokens, if the training step is to find it."""
        if self.splits_in_python:
            return self.split.auto
        return self.micro_batch_size if self.finds_size else None

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
        return isinstance(self.micro_batch_size, AutoSize)

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
        """Whether the network's loss is a mean over its items, as where nothing says it."""
        return self.reduction in (None, "mean")

    @property
    def accumulates(self) -> bool:
        """Whether there is anything to accumulate: not with one micro-batch that is never left out."""
        return self.micro_size != 1 or self.accumulation_steps > 1 or self.counted or self.several_losses


def check_each(owner: str, options: Options) -> None:
    """Check each option by itself; `owner` is the class in errors."""
    for field in dataclasses.fields(options):
        field.metadata["check"](owner, field.name, getattr(options, field.name))


def completed(options: Options) -> Options:
    """The options of a cell, with what follows from those that were given."""
    size_is_open = options.micro_batch_size is None and not options.splits_in_python
    losses = len(options.count) if isinstance(options.count, (tuple, list)) else 1
    weights = options.loss_weights if options.loss_weights is not None else (1.0,) * losses
    return dataclasses.replace(
        options,
        micro_size=1 if options.micro_size is None and size_is_open else options.micro_size,
        accumulation_steps=options.accumulation_steps or 1,
        transforms=tuple(options.transforms),
        loss_weights=tuple(float(weight) for weight in weights),
    )
