"""What does not go together, and where: one table, the source of the errors and of the table in the docs. Each row is
when, which error, which remedy."""

from __future__ import annotations

import math

import mindspore as ms
from mindspore import nn

from gaccum_ms.layers.window_batchnorm import WindowBatchNorm
from gaccum_ms.options.options import Options
from gaccum_ms.options.rules import (
    AUDIT,
    AUTO,
    AUTO_TOKENS,
    BATCH_LOSS,
    CELL,
    DROPS,
    FUNCTION,
    GIVEN,
    IN_LOOPS,
    IN_ONE_GRAPH,
    LOSS,
    PIPELINE,
    RATIO,
    REPORT,
    SEMI_AUTO,
    SEVERAL,
    STEPS,
    TRIAL,
    UPDATE,
    Rule,
    Setup,
)
from gaccum_ms.transforms.chain import clips_before_spikes, name_of, sees_parts


def _sizes(options: Options) -> int:
    """How many of the two sizes of micro-batches are given."""
    return (options.micro_size is not None) + (options.micro_batch_size is not None)


def _only_spans_batches(options: Options) -> bool:
    """Whether each batch is one micro-batch of a window."""
    return _sizes(options) == 0 and options.accumulation_steps is not None


def _pools_statistics(network: nn.Cell) -> bool:
    return any(isinstance(cell, WindowBatchNorm) for _, cell in network.cells_and_names())


def _given(options: Options, **is_refused: bool) -> str:
    """Those of the named options that are refused, with their values; empty if none is."""
    return ", ".join(f"{name}={getattr(options, name)!r}" for name, refused in is_refused.items() if refused)


def _beside_several_losses(options: Options, **is_refused: bool) -> str:
    return _given(
        options,
        micro_batch_size=options.finds_size,
        accumulation_steps=options.accumulation_steps > 1,
        overflow=options.drops,
        record_noise=options.record_noise,
        aux=options.aux,
        split=options.splits_in_python,
        **is_refused,
    )


def _beside_batch_loss(options: Options) -> str:
    return _beside_several_losses(
        options,
        reduction=options.returns_ratio,
        count=options.own_count is not None,
        min_count=options.min_count is not None,
        loss_weights=options.several_losses,
    )


def _beside_semi_auto(setup: Setup) -> str:
    options = setup.options
    return _given(
        options,
        micro_batch_size=options.micro_batch_size is not None,
        accumulators=options.accumulators.compensated or setup.accumulates_in_lower_precision,
        overflow=options.drops,
        record_noise=options.record_noise,
        split=options.splits_in_python or options.axis != 0,
    )


RULES = (
    # -- whatever the options --
    Rule(
        SEMI_AUTO,
        "PyNative mode",
        SEMI_AUTO,
        lambda s: ms.get_context("mode") != ms.GRAPH_MODE,
        "semi-auto and auto parallel mode need graph mode, because the compiler distributes graphs, but got PyNative "
        "mode. Use ms.set_context(mode=ms.GRAPH_MODE).",
        RuntimeError,
        instead="`ms.set_context(mode=ms.GRAPH_MODE)`",
    ),
    Rule(
        SEMI_AUTO,
        BATCH_LOSS,
        SEMI_AUTO,
        lambda s: s.of_batch,
        "in semi-auto and auto parallel mode the compiler's own passes accumulate, which take each micro-batch once, "
        "but got a network of class 'WithBatchLossCell', whose micro-batches go forward twice. Use data parallel mode, "
        "with gather_ranks=True where the loss is to see the samples of all devices.",
        instead="data parallel mode, with `gather_ranks=True`",
    ),
    Rule(
        CELL,
        BATCH_LOSS,
        f"{AUTO}, {STEPS}, {RATIO}, `count`, `min_count`, {SEVERAL}, {DROPS}, `record_noise`, `aux`, {FUNCTION}",
        lambda s: s.of_batch and _beside_batch_loss(s.options),
        "a network of class 'WithBatchLossCell' has one loss, of all samples of the window at once, of which no "
        "micro-batch has a part of its own, but got {refused}. Leave this out. Use larger batches and a larger "
        "'micro_size', which need no more memory, and EvenSplit; weigh, add up and divide in 'loss_fn'; for other "
        "outputs call the backbone itself.",
        instead="larger batches and `micro_size`; weigh, add up and divide in `loss_fn`",
    ),
    Rule(
        CELL,
        SEVERAL,
        f"{AUTO}, {STEPS}, {DROPS}, `record_noise`, `aux`, {FUNCTION}",
        lambda s: s.options.several_losses and _beside_several_losses(s.options),
        "each of several losses is divided by a total of its own, and here there is one total alone, but got {refused} "
        "and {options.losses} loss(es). Leave this out, and use larger batches, a larger 'micro_size' and EvenSplit; "
        "or add the losses up in the network, where one total serves all, or where each is divided by its window's "
        "total, an input of each batch that EvenSplit shares, with reduction='sum'. With aux=True it may return each, "
        "too, as an output of shape ().",
        instead="add the losses up in the network; or larger batches and `micro_size`",
    ),
    Rule(
        PIPELINE,
        SEVERAL,
        PIPELINE,
        lambda s: s.options.several_losses,
        "in a pipeline the network must return one loss, because the totals of several are known too late, on the last "
        "stage and after its last micro-batch, but got {options.losses} losses. Return their weighted sum, or its "
        "numerator and denominator with reduction='ratio'.",
        instead="return their weighted sum, or a ratio",
    ),
    Rule(
        SEMI_AUTO,
        f"`micro_batch_size`, `Accumulators(compensated=True)` or of a lower precision than weights, {DROPS}, "
        f"`record_noise`, {FUNCTION}, `EvenSplit(axis=...)`",
        SEMI_AUTO,
        _beside_semi_auto,
        "in semi-auto and auto parallel mode the compiler itself cuts all inputs along axis 0, into a number of "
        "micro-batches that it must know, and adds up their gradients, of which none is seen or left out, but got "
        "{refused}. Give 'micro_size', EvenSplit(shared=...), and accumulators of the weights' precision at least, "
        "such as Accumulators(mindspore.float32), not compensated; and leave the rest out. Data parallel mode has no "
        "such limit.",
        instead="`micro_size`, `EvenSplit(shared=...)`, `Accumulators(mindspore.float32)`; or data parallel mode",
    ),
    Rule(
        TRIAL,
        TRIAL,
        BATCH_LOSS,
        lambda s: s.of_batch,
        "the network of 'cell' must have a loss that one micro-batch can be tried with, but got a 'WithBatchLossCell', "
        "whose loss needs all samples, and with 'gather_ranks' all ranks. Ask about its backbone, with any loss: "
        "intermediate values of the backbone are what grows with micro-batches.",
        instead="ask about its backbone, with any loss",
    ),
    Rule(
        TRIAL,
        TRIAL,
        SEMI_AUTO,
        lambda s: s.compiler_distributes,
        "the parallel mode must be 'stand_alone' or 'data_parallel', but got '{mode}': there the compiler lays a graph "
        "out over all devices, and no rank can try its part alone. Look at 'mindspore.runtime.max_memory_allocated()' "
        "after a step.",
        RuntimeError,
        instead="`mindspore.runtime.max_memory_allocated()` after a step",
    ),
    # -- micro_size, micro_batch_size --
    Rule(
        GIVEN,
        "`micro_size`, `micro_batch_size`",
        FUNCTION,
        lambda s: s.options.splits_in_python and _sizes(s.options) > 0,
        "with a function as 'split', which makes the micro-batches, neither 'micro_size' nor 'micro_batch_size' must "
        "be given, but got micro_size={options.micro_size} and micro_batch_size={options.micro_batch_size}. Leave both "
        "out, or the function.",
        instead="one of the three",
    ),
    Rule(
        GIVEN,
        "`micro_size`",
        "`micro_batch_size`; neither, without `accumulation_steps`",
        lambda s: not s.options.splits_in_python and _sizes(s.options) != 1 and not _only_spans_batches(s.options),
        "exactly one of 'micro_size' (number of micro-batches) and 'micro_batch_size' (samples in one) must be given, "
        "or neither with 'accumulation_steps' (batches that share an update), but got "
        "micro_size={options.micro_size}, micro_batch_size={options.micro_batch_size} and "
        "accumulation_steps={options.accumulation_steps}.",
        instead="one of the two",
    ),
    Rule(
        CELL,
        f"{AUTO}, {AUTO_TOKENS}",
        "`jit=False`",
        lambda s: s.options.auto and s.options.jit is False,
        "what finds the size of micro-batches compiles in PyNative mode too, because MindSpore's eager gradient does "
        "not survive running out of memory, but got jit=False. Leave 'jit' out, or give a number of samples or tokens.",
        instead="leave `jit` out, or give a number",
    ),
    Rule(
        IN_ONE_GRAPH,
        f"{AUTO}, {FUNCTION}",
        IN_ONE_GRAPH,
        lambda s: s.options.finds_size or s.options.splits_in_python,
        "micro_batch_size='auto' and a function as 'split' need Python at each batch, to try again what ran out of "
        "memory or to call the function, but the training step is part of another graph, as with data sinking. Use "
        "model.train(..., dataset_sink_mode=False); or EvenSplit, and the number that "
        "gaccum_ms.find_micro_batch_size returns.",
        RuntimeError,
        instead="`dataset_sink_mode=False`; or `EvenSplit`, and what `find_micro_batch_size` returns",
    ),
    Rule(
        AUDIT,
        f"{AUTO}, {AUTO_TOKENS}",
        AUDIT,
        lambda s: s.options.auto,
        "the size of micro-batches must be given, because with it the batch is compared, but got "
        "micro_batch_size={options.micro_batch_size!r} and split={options.split!r}. Give 'micro_size', or the number "
        "of samples or tokens that 'find_micro_batch_size' returns.",
        instead="`micro_size`, or what `find_micro_batch_size` returns",
    ),
    # -- accumulation_steps --
    Rule(
        PIPELINE,
        STEPS,
        PIPELINE,
        lambda s: s.options.accumulation_steps > 1,
        "in a pipeline 'accumulation_steps' must be 1, because between two batches all stages would stand idle, "
        "but got {options.accumulation_steps}. Use larger batches and a larger 'micro_size', which need no more "
        "memory.",
        instead="larger batches and `micro_size`",
    ),
    # -- reduction --
    Rule(
        LOSS,
        "`reduction`",
        "a loss whose own `reduction` is another",
        lambda s: s.contradicts_loss,
        "'reduction' must be what the loss says, but got reduction={options.reduction!r} and a '{stated.loss}' "
        "with reduction='{stated.reduction}'. Leave 'reduction' out, which is then what the loss says, or make "
        "the loss with the reduction that is meant.",
        instead="leave `reduction` out, or change the loss's",
    ),
    Rule(
        LOSS,
        'a loss whose own `reduction` is `"none"`',
        "a network without `PerSampleLoss`",
        lambda s: s.stated is not None and s.stated.reduction == "none",
        "the loss must be one number, the mean or the sum of a batch, but got a '{stated.loss}' with "
        "reduction='none', which is one for each item. Make it with reduction='mean' or 'sum'; or give the network "
        "gaccum_ms.PerSampleLoss(nn.WithLossCell(net, loss)), which takes the mean.",
        instead="`PerSampleLoss` around the network, or another reduction",
    ),
    Rule(
        CELL,
        '`reduction="sum"`',
        "several losses, without a `count` for each",
        lambda s: s.options.reduction == "sum" and s.options.several_losses and None in s.options.counts,
        "reduction='sum' with 'loss_weights' needs a 'count' for each loss, but got count={options.count}. Give a "
        "count for each, or means.",
        instead="a `count` for each, or means",
    ),
    Rule(
        CELL,
        RATIO,
        "`count`",
        lambda s: s.options.returns_ratio and s.options.count is not None,
        "with reduction='ratio' the network returns its numerator and what that is divided by, and nothing else "
        "says it, but got count={options.count}. Leave 'count' out; or return means or sums, and give reduction='mean' "
        "or 'sum'.",
        instead="leave `count` out, or return means or sums",
    ),
    Rule(
        IN_LOOPS,
        RATIO,
        f"{SEVERAL}, {IN_LOOPS}",
        lambda s: s.options.returns_ratio and s.options.several_losses,
        "reduction='ratio' is for one loss, because each loss is divided by its own total before its backward, and "
        "a ratio's total is known afterwards, but got {options.losses} losses. Return sums, with reduction='sum' "
        "and a 'count' for each.",
        instead='sums, with `reduction="sum"` and a `count` for each',
    ),
    # -- count, min_count --
    Rule(
        CELL,
        "`min_count`",
        f"neither `count` nor {RATIO}",
        lambda s: s.options.min_count is not None and not s.options.counts_items,
        "'min_count' is the least count of items that a window is divided by, which needs a 'count' or "
        "reduction='ratio', but got min_count={options.min_count}, count={options.count} and "
        "reduction={options.reduction!r}. Leave it out, or give 'count' or a ratio.",
        instead="give `count` or a ratio, or leave it out",
    ),
    # -- loss_weights --
    Rule(
        GIVEN,
        "`loss_weights`",
        "a `count` with more or fewer entries",
        lambda s: (
            s.options.count is not None
            and s.options.loss_weights is not None
            and len(s.options.counts) != s.options.losses
        ),
        "'count' and 'loss_weights' must have one entry for each loss, but got count={options.count} and "
        "loss_weights={options.loss_weights}.",
        instead="one entry for each loss",
    ),
    Rule(
        CELL,
        "`WindowBatchNorm`",
        "three or more losses with a `count`",
        lambda s: s.options.losses > 2 and s.options.own_count is not None and _pools_statistics(s.network),
        "'WindowBatchNorm' pools a micro-batch's statistics in each forward, and where one of three or more losses "
        "counts nothing, forward runs once for each other loss, but got {options.losses} losses. Add losses up in "
        "the network, or use nn.GroupNorm.",
        instead="add losses up in the network, or `nn.GroupNorm`",
    ),
    # -- transforms --
    Rule(
        UPDATE,
        "`SkipSpikes`",
        "`max_grad_norm`, or a `ClipByGlobalNorm` before it",
        lambda s: clips_before_spikes(s.options.max_grad_norm not in (None, math.inf), s.options.transforms),
        "'SkipSpikes' must come before the gradient is clipped by its global norm, which leaves no spike to see, but "
        "got it behind 'max_grad_norm' or a 'ClipByGlobalNorm'. Give transforms=(SkipSpikes(...), "
        "ClipByGlobalNorm(...)), and leave 'max_grad_norm' out.",
        instead="`transforms=(SkipSpikes(...), ClipByGlobalNorm(...))`",
    ),
    Rule(
        SEMI_AUTO,
        "`transforms`: functions, `AdaptiveGradientClip`, and your own without `elementwise = True`",
        SEMI_AUTO,
        lambda s: ", ".join(name_of(transform) for transform in s.options.transforms if not sees_parts(transform)),
        "in semi-auto and auto parallel mode each of 'transforms' must treat each element of a gradient by itself, "
        "because a gradient is one device's part there, but got {refused}. Give a "
        "Transform whose class says elementwise = True; or ClipByGlobalNorm or SkipSpikes, which take the norm of "
        "all parts. 'AdaptiveGradientClip' needs the norms of rows, of which each may lie on several devices.",
        instead="`elementwise = True`, `ClipByGlobalNorm` or `SkipSpikes`",
    ),
    # -- overflow, record_noise --
    Rule(
        CELL,
        f"{DROPS}, `record_noise`",
        "a sum without `count`",
        lambda s: (
            (s.options.drops or s.options.record_noise) and s.options.reduction == "sum" and not s.options.own_count
        ),
        "overflow='drop_micro_batch', which divides what is left by its count, and 'record_noise', which compares mean "
        "gradients, need a loss that is a mean, or a sum with 'count', but got overflow={options.overflow!r}, "
        "record_noise={options.record_noise}, reduction='sum' and count={options.count}. Give a 'count' or a mean, or "
        "leave them out.",
        instead="a `count`, or a mean",
    ),
    # -- split --
    Rule(
        CELL,
        "`split=MaxTokens(...)`",
        "samples as weights: it needs `count`",
        lambda s: s.options.trims and not s.options.counts_items,
        "'split' of class 'MaxTokens' fills micro-batches up with rows of padding, which must weigh nothing, but "
        "got count=None, by which they weigh as samples. Give a 'count' of tokens that are not padding, such as "
        "gaccum_ms.CountNotIgnored(), or reduction='ratio'.",
        instead='`count=CountNotIgnored()`, or `reduction="ratio"`',
    ),
    Rule(
        PIPELINE,
        "`EvenSplit(shared=...)`",
        PIPELINE,
        lambda s: bool(s.options.shared),
        "in a pipeline the argument 'split' must be None, but got {options.split!r}: the compiler's pass finds no "
        "micro-batches where an input is not cut. Repeat the input for each sample, or make it a Parameter.",
        instead="repeat the input for each sample, or a Parameter",
    ),
    Rule(
        AUDIT,
        FUNCTION,
        AUDIT,
        lambda s: s.options.splits_in_python and not s.options.trims,
        "the batch must be the network's inputs, so that the whole batch can be trained with too, but got a "
        "function as 'split': only the function is known to make inputs of it. Train one step each with this "
        "function and with one that returns the batch as one micro-batch, and compare the weights.",
        instead="compare with a function that returns one micro-batch",
    ),
    Rule(
        TRIAL,
        TRIAL,
        FUNCTION,
        lambda s: s.options.splits_in_python and not s.options.trims,
        "micro-batches must be so many samples of the batch, of which other numbers can be tried, but got a "
        "function as 'split': only the function is known to make micro-batches. Ask about a cell with "
        "'micro_size', and a batch as large as the function's largest micro-batch.",
        instead="ask about a cell with `micro_size`",
    ),
    Rule(
        REPORT,
        REPORT,
        "`split=MaxTokens(...)`",
        lambda s: s.options.splits_in_python,
        "micro-batches must be so many samples of the batch, of which each number is a row of the report, but got "
        "'split' of class 'MaxTokens', whose micro-batches are so many tokens. 'find_micro_batch_size' finds how "
        "many fit.",
        instead="`find_micro_batch_size`",
    ),
)


def refused(place: str, owner: str, setup: Setup) -> Exception | None:
    """The error of the first rule that refuses the setup at this place; None if all options go together."""
    first = next((rule for rule in RULES if rule.place == place and rule.refuses(setup)), None)
    return None if first is None else first.error(first.message(owner, setup))


def check(place: str, owner: str, setup: Setup) -> None:
    """Raise what `refused` returns."""
    error = refused(place, owner, setup)
    if error is not None:
        raise error
