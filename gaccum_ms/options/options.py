"""The options of accumulation, each once: its type, its default, its check, what of it matters for memory, and what it
does not go with. The signature and docstring of `GradAccumulationCell` are compared with this; errors, the table in the
docs and the key of found sizes are made from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mindspore import nn

from gaccum_ms.checks.arguments import (
    check_bool,
    check_one_of,
    check_positive,
    check_positive_finite,
    check_positive_int,
)
from gaccum_ms.layers.window_batchnorm import WindowBatchNorm
from gaccum_ms.options.accumulators import Accumulators
from gaccum_ms.options.checks import (
    check_accumulators,
    check_count,
    check_loss_weights,
    check_micro_batch_size,
    check_transforms,
    optional,
)
from gaccum_ms.options.rules import (
    AUDIT,
    AUTO,
    AUTO_TOKENS,
    BATCH_LOSS,
    CELL,
    DROPS,
    FUNCTION,
    IN_LOOPS,
    IN_ONE_GRAPH,
    LOSS,
    PIPELINE,
    RATIO,
    REPORT,
    SEMI_AUTO,
    SEVERAL,
    TRIAL,
    Rule,
    only_in_semi_auto,
    only_of_batch_loss,
)
from gaccum_ms.splitting.auto_size import AutoSize, auto_size_of
from gaccum_ms.splitting.even_split import EvenSplit
from gaccum_ms.splitting.splitter import check_split, splitter_of
from gaccum_ms.transforms.chain import name_of, sees_parts


class Option(NamedTuple):
    """What is known of an option besides its name and default."""

    check: Callable[[str, str, Any], None]  # of the class in errors, the option's name, and its value
    rules: tuple[Rule, ...]  # what it does not go with
    for_memory: Callable[[Any], Any]  # what of the value decides which size of micro-batches fits
    annotation: str | None  # the type that a user gives, if that of the field is Any


def option(
    check: Callable[[str, str, Any], None],
    *rules: Rule,
    default: Any = None,
    for_memory: Callable[[Any], Any] = repr,
    annotation: str | None = None,
) -> Any:
    """The field of an option."""
    return dataclasses.field(default=default, metadata={"option": Option(check, rules, for_memory, annotation)})


def _nothing(value: Any) -> None:
    """A trial chooses the size by itself."""


def _is_given(value: Any) -> Any:
    """Whether there is one; of several losses, for each."""
    return tuple(map(_is_given, value)) if isinstance(value, (tuple, list)) else value is not None


def _classes(values: Any) -> tuple[str, ...]:
    return tuple(type(value).__qualname__ for value in values)


def _pools_statistics(network: nn.Cell) -> bool:
    return any(isinstance(cell, WindowBatchNorm) for _, cell in network.cells_and_names())


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of :class:`GradAccumulationCell` besides the network, under the same names. A
    :class:`GradAccumulator` has those of them that do not concern how a batch is cut and weighted."""

    micro_size: int | None = option(optional(check_positive_int), for_memory=_nothing)
    micro_batch_size: Any = option(
        check_micro_batch_size,
        Rule(
            CELL,
            AUTO,
            "`jit=False`",
            lambda s: s.options.finds_size and s.options.jit is False,
            "micro_batch_size='auto' compiles in PyNative mode too, because MindSpore's eager gradient does not "
            "survive running out of memory, but got jit=False. Leave 'jit' out, or give a number of samples.",
        ),
        Rule(
            CELL,
            AUTO,
            f"several losses, {BATCH_LOSS}",
            lambda s: s.options.finds_size and (s.options.several_losses or s.of_batch),
            "micro_batch_size='auto' needs one loss that is a mean or sum over samples, so that each rank can try a "
            "batch again by itself, but got {options.losses} loss(es) and a network of class '{network}'. Give the "
            "number of samples; "
            "'find_micro_batch_size' finds it for what is not a 'WithBatchLossCell'.",
        ),
        Rule(
            IN_ONE_GRAPH,
            AUTO,
            IN_ONE_GRAPH,
            lambda s: s.options.finds_size,
            "micro_batch_size='auto' needs Python between the batches, to try again what ran out of memory, but the "
            "training step is part of another graph, as with data sinking. Use model.train(..., "
            "dataset_sink_mode=False), or the number that gaccum_ms.find_micro_batch_size returns.",
            RuntimeError,
        ),
        only_in_semi_auto(
            "micro_batch_size",
            None,
            "the compiler must know the number of micro-batches before it sees a batch; give 'micro_size'",
        ),
        Rule(
            AUDIT,
            AUTO,
            AUDIT,
            lambda s: s.options.finds_size,
            "the number of micro-batches must be given, because with it the batch is compared, but got "
            "micro_batch_size='auto'. Give 'micro_size', or a 'micro_batch_size' such as 'find_micro_batch_size' "
            "returns.",
        ),
        for_memory=lambda size: isinstance(size, AutoSize),
        annotation="int | AutoSize | str | None",
    )
    accumulation_steps: Any = option(
        optional(check_positive_int),
        Rule(
            PIPELINE,
            "`accumulation_steps`",
            PIPELINE,
            lambda s: s.options.accumulation_steps > 1,
            "in a pipeline 'accumulation_steps' must be 1, because between two batches all stages would stand idle, "
            "but got {options.accumulation_steps}. Use larger batches and a larger 'micro_size', which need no more "
            "memory.",
        ),
        Rule(
            CELL,
            "`accumulation_steps`",
            SEVERAL,
            lambda s: s.options.accumulation_steps > 1 and s.options.several_losses,
            "'accumulation_steps' must be 1 for a network of several losses, because each is divided by a total of "
            "its own, which one accumulator cannot be once the first batches are in it, but got "
            "accumulation_steps={options.accumulation_steps} and {options.losses} losses. Use larger batches and "
            "'micro_size'. Or add the losses up in the network: where one total serves all; or each divided by its "
            "window's total, which is an input of each batch that EvenSplit shares, with reduction='sum'.",
        ),
        only_of_batch_loss(
            "accumulation_steps",
            1,
            "the loss needs all samples of the window at once, and the first batches of a window are gone when the "
            "last one comes; use larger batches and a larger 'micro_size', which need no more memory",
        ),
        for_memory=lambda steps: steps > 1,
        annotation="int | None",
    )
    reduction: str | None = option(
        optional(lambda owner, name, value: check_one_of(owner, name, value, ("mean", "sum", "ratio"))),
        Rule(
            LOSS,
            "`reduction`",
            "a loss whose own `reduction` is another",
            lambda s: s.contradicts_loss,
            "'reduction' must be what the loss says, but got reduction={options.reduction!r} and a '{stated.loss}' "
            "with reduction='{stated.reduction}'. Leave 'reduction' out, which is then what the loss says, or make "
            "the loss with the reduction that is meant.",
        ),
        Rule(
            LOSS,
            'a loss whose own `reduction` is `"none"`',
            "a network without `PerSampleLoss`",
            lambda s: s.stated is not None and s.stated.reduction == "none",
            "the loss must be one number, the mean or the sum of a batch, but got a '{stated.loss}' with "
            "reduction='none', which is one for each item. Make it with reduction='mean' or 'sum'; or give the network "
            "gaccum_ms.PerSampleLoss(nn.WithLossCell(net, loss)), which takes the mean.",
        ),
        Rule(
            CELL,
            '`reduction="sum"`',
            "several losses, without a `count` for each",
            lambda s: s.options.reduction == "sum" and s.options.several_losses and None in s.options.counts,
            "reduction='sum' with 'loss_weights' needs a 'count' for each loss, but got count={options.count}. Give a "
            "count for each, or means.",
        ),
        Rule(
            CELL,
            RATIO,
            f"`count`, {BATCH_LOSS}",
            lambda s: s.options.returns_ratio and (s.options.count is not None or s.of_batch),
            "with reduction='ratio' the network returns its numerator and what that is divided by, and nothing else "
            "says it, but got count={options.count} and a network of class '{network}'. Leave 'count' out; or return "
            "means or sums, and give reduction='mean' or 'sum'.",
        ),
        Rule(
            IN_LOOPS,
            RATIO,
            f"{SEVERAL}, {IN_LOOPS}",
            lambda s: s.options.returns_ratio and s.options.several_losses,
            "reduction='ratio' is for one loss, because each loss is divided by its own total before its backward, and "
            "a ratio's total is known afterwards, but got {options.losses} losses. Return sums, with reduction='sum' "
            "and a 'count' for each.",
        ),
        annotation="str | None",
    )
    count: Callable | Sequence[Callable | None] | None = option(
        check_count,
        Rule(
            CELL,
            "`count`",
            BATCH_LOSS,
            lambda s: s.of_batch and s.options.own_count is not None,
            "with a network of class 'WithBatchLossCell' the argument 'count' must be None, but got {options.count}: "
            "the loss is not a mean over micro-batches, which could weigh by their counts; 'loss_fn' itself divides by "
            "what it likes.",
        ),
        for_memory=_is_given,
    )
    min_count: float | None = option(
        optional(check_positive_finite),
        Rule(
            CELL,
            "`min_count`",
            f"neither `count` nor {RATIO}, {BATCH_LOSS}",
            lambda s: s.options.min_count is not None and (not s.options.counts_items or s.of_batch),
            "'min_count' is the least count of items that a window is divided by, which needs a 'count' or "
            "reduction='ratio', but got min_count={options.min_count}, count={options.count}, "
            "reduction={options.reduction!r} and a network of class '{network}'. Leave it out, or give 'count' or a "
            "ratio.",
        ),
        for_memory=_is_given,
    )
    loss_weights: Any = option(
        check_loss_weights,
        Rule(
            CELL,
            "`WindowBatchNorm`",
            "three or more losses with a `count`",
            lambda s: s.options.losses > 2 and s.options.own_count is not None and _pools_statistics(s.network),
            "'WindowBatchNorm' pools a micro-batch's statistics in each forward, and where one of three or more losses "
            "counts nothing, forward runs once for each other loss, but got {options.losses} losses. Add losses up in "
            "the network, or use nn.GroupNorm.",
        ),
        only_of_batch_loss("loss_weights", (1.0,), "add the losses up in 'loss_fn'", SEVERAL),
        annotation="Sequence[float] | None",
    )
    max_grad_norm: float | None = option(optional(check_positive), for_memory=_is_given)
    transforms: Any = option(
        check_transforms,
        Rule(
            SEMI_AUTO,
            "`transforms`: functions, `AdaptiveGradientClip`, and your own without `elementwise = True`",
            SEMI_AUTO,
            lambda s: bool(s.options.seeing_more_than_elements),
            "in semi-auto and auto parallel mode each of 'transforms' must treat each element of a gradient by itself, "
            "because a gradient is one device's part there, but got {options.seeing_more_than_elements}. Give a "
            "Transform whose class says elementwise = True; or ClipByGlobalNorm or SkipSpikes, which take the norm of "
            "all parts. 'AdaptiveGradientClip' needs the norms of rows, of which each may lie on several devices.",
        ),
        default=(),
        for_memory=_classes,
        annotation="Sequence[Any]",
    )
    accumulators: Any = option(
        check_accumulators,
        Rule(
            SEMI_AUTO,
            "`Accumulators(compensated=True)`, or of a lower precision than weights",
            SEMI_AUTO,
            lambda s: s.options.accumulators.compensated or s.accumulates_in_lower_precision,
            "in semi-auto and auto parallel mode the argument 'accumulators' must have compensated=False, and the "
            "precision of the weights at least, but got {options.accumulators}: the compiler's own pass adds the "
            "gradients; give Accumulators(mindspore.float32). Data parallel mode has no such limit.",
        ),
        annotation="Accumulators | None",
    )
    overflow: str = option(
        lambda owner, name, value: check_one_of(owner, name, value, ("drop_window", "drop_micro_batch")),
        Rule(
            CELL,
            DROPS,
            "several losses, a sum without `count`",
            lambda s: s.options.drops and (s.options.several_losses or s.sum_without_count),
            "overflow='drop_micro_batch' divides what is left by its count, which must be one loss's mean, or a sum "
            "with 'count', but got {options.losses} loss(es), reduction={options.reduction!r} and "
            "count={options.count}. Use overflow='drop_window'.",
        ),
        only_of_batch_loss(
            "overflow",
            "drop_window",
            "a micro-batch cannot be left out, because all others are compared with it",
            DROPS,
        ),
        only_in_semi_auto(
            "overflow", "drop_window", "the compiler's own pass adds the gradients, and leaves none out", DROPS
        ),
        default="drop_window",
    )
    record_noise: bool = option(
        check_bool,
        Rule(
            CELL,
            "`record_noise`",
            "several losses, a sum without `count`",
            lambda s: s.options.record_noise and (s.options.several_losses or s.sum_without_count),
            "'record_noise' compares the mean gradient of one micro-batch with the window's, which needs one loss "
            "that is a mean, or a sum with 'count', but got {options.losses} loss(es), "
            "reduction={options.reduction!r} and count={options.count}. Use reduction='mean', and add losses up in the "
            "network.",
        ),
        only_of_batch_loss(
            "record_noise",
            False,
            "a micro-batch's part of the gradient is not an estimate of the whole: it depends on all other samples",
        ),
        only_in_semi_auto("record_noise", False, "the compiler's own pass adds the gradients, and none is seen"),
        default=False,
    )
    aux: bool = option(
        check_bool,
        Rule(
            CELL,
            "`aux`",
            f"several losses, {BATCH_LOSS}",
            lambda s: s.options.aux and (s.options.several_losses or s.of_batch),
            "with aux=True the network must return one loss before its other outputs, from one forward of each "
            "micro-batch, but got {options.losses} loss(es) and a network of class '{network}'. Add losses up in the "
            "network, and return each as an output of shape (); of a 'WithBatchLossCell' call the backbone itself.",
        ),
        default=False,
    )
    jit: bool | None = option(optional(check_bool), for_memory=bool)
    split: Any = option(
        check_split,
        Rule(
            CELL,
            "`split=MaxTokens(...)`",
            "samples as weights: it needs `count`",
            lambda s: s.options.splits_in_python and s.options.split.needs_count and not s.options.counts_items,
            "'split' of class 'MaxTokens' fills micro-batches up with rows of padding, which must weigh nothing, but "
            "got count=None, by which they weigh as samples. Give a 'count' of tokens that are not padding, such as "
            "gaccum_ms.CountNotIgnored(), or reduction='ratio'.",
        ),
        Rule(
            CELL,
            AUTO_TOKENS,
            "`jit=False`",
            lambda s: s.options.finds_tokens and s.options.jit is False,
            "MaxTokens('auto', ...) compiles in PyNative mode too, because MindSpore's eager gradient does not survive "
            "running out of memory, but got jit=False. Leave 'jit' out, or give a number of tokens.",
        ),
        Rule(
            CELL,
            FUNCTION,
            f"several losses, {BATCH_LOSS}",
            lambda s: s.options.splits_in_python and (s.options.several_losses or s.of_batch),
            "a function as 'split' needs one loss that is a mean or sum over samples, because each rank adds "
            "micro-batches one at a time, as many as it has, but got {options.losses} loss(es) and a network of class "
            "'{network}'. Add losses up in the network, or use EvenSplit.",
        ),
        Rule(
            IN_ONE_GRAPH,
            FUNCTION,
            IN_ONE_GRAPH,
            lambda s: s.options.splits_in_python,
            "a function as 'split' needs Python at each batch, which calls it, but the training step is part of "
            "another graph, as with data sinking. Use model.train(..., dataset_sink_mode=False), or EvenSplit.",
            RuntimeError,
        ),
        Rule(
            PIPELINE,
            "`EvenSplit(shared=...)`",
            PIPELINE,
            lambda s: bool(s.options.shared),
            "in a pipeline the argument 'split' must be None, but got {options.split!r}: the compiler's pass finds no "
            "micro-batches where an input is not cut. Repeat the input for each sample, or make it a Parameter.",
        ),
        Rule(
            SEMI_AUTO,
            "`split`: a function, or `EvenSplit(axis=...)`",
            SEMI_AUTO,
            lambda s: s.options.splits_in_python or s.options.axis != 0,
            "in semi-auto and auto parallel mode the argument 'split' must be None or EvenSplit(shared=...), but got "
            "{options.split!r}: the compiler itself cuts all inputs along axis 0. Data parallel mode has no such "
            "limit.",
        ),
        Rule(
            AUDIT,
            FUNCTION,
            AUDIT,
            lambda s: s.options.splits_in_python and not s.options.trims,
            "the batch must be the network's inputs, so that the whole batch can be trained with too, but got a "
            "function as 'split': only the function is known to make inputs of it. Train one step each with this "
            "function and with one that returns the batch as one micro-batch, and compare the weights.",
        ),
        Rule(
            TRIAL,
            TRIAL,
            FUNCTION,
            lambda s: s.options.splits_in_python and not s.options.trims,
            "micro-batches must be so many samples of the batch, of which other numbers can be tried, but got a "
            "function as 'split': only the function is known to make micro-batches. Ask about a cell with "
            "'micro_size', and a batch as large as the function's largest micro-batch.",
        ),
        Rule(
            AUDIT,
            AUTO_TOKENS,
            AUDIT,
            lambda s: s.options.finds_tokens,
            "the number of tokens in a micro-batch must be given, because with it the batch is compared, but got "
            "MaxTokens('auto', ...). Give a number such as 'find_micro_batch_size' returns.",
        ),
        Rule(
            REPORT,
            REPORT,
            "`split=MaxTokens(...)`",
            lambda s: s.options.splits_in_python,
            "micro-batches must be so many samples of the batch, of which each number is a row of the report, but got "
            "'split' of class 'MaxTokens', whose micro-batches are so many tokens. 'find_micro_batch_size' finds how "
            "many fit.",
        ),
        for_memory=lambda split: repr(split) if isinstance(split, EvenSplit) else None,
        annotation="EvenSplit | Callable | None",
    )

    def __post_init__(self) -> None:
        """Short forms become what they stand for, and NumPy's numbers Python's, which a graph can hold."""
        for name, value in vars(self).items():
            if isinstance(value, np.generic):
                object.__setattr__(self, name, value.item())
        object.__setattr__(self, "micro_batch_size", auto_size_of(self.micro_batch_size))
        object.__setattr__(self, "split", splitter_of(self.split))
        if self.accumulators is None:
            object.__setattr__(self, "accumulators", Accumulators())

    def for_memory(self) -> tuple:
        """What of the options decides which size of micro-batches fits."""
        return tuple(known.for_memory(getattr(self, name)) for name, known in each_option(type(self)).items())

    @property
    def seeing_more_than_elements(self) -> str:
        """The transforms that must not get parts of gradients, by name; empty if there are none."""
        return ", ".join(name_of(transform) for transform in self.transforms if not sees_parts(transform))

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
    def auto(self) -> AutoSize | None:
        """The search for the size of micro-batches, in samples or tokens, if the training step is to find it."""
        if self.splits_in_python:
            return self.split.auto
        return self.micro_batch_size if self.finds_size else None

    @property
    def finds_tokens(self) -> bool:
        """Whether the training step finds how many tokens that function puts into a micro-batch."""
        return self.splits_in_python and self.auto is not None

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


def each_option(kind: type[Options]) -> dict[str, Option]:
    """All options, by name."""
    return {field.name: field.metadata["option"] for field in dataclasses.fields(kind)}


def check_each(owner: str, options: Options) -> None:
    """Check each option by itself; `owner` is the class in errors."""
    for name, known in each_option(type(options)).items():
        known.check(owner, name, getattr(options, name))
