"""What does not go together, and where: one table, the source of the errors and of the table in the docs. Each row is
when, which error, which remedy."""

from __future__ import annotations

import mindspore as ms
from mindspore import nn

from gaccum_ms.distributed.stages import stages
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
    SPAN_LATER,
    TRIAL,
    UPDATE,
    Rule,
    Setup,
    only_in_semi_auto,
    only_of_batch_loss,
)


def _sizes(options: Options) -> int:
    """How many of the two sizes of micro-batches are given."""
    return (options.micro_size is not None) + (options.micro_batch_size is not None)


def _only_spans_batches(options: Options) -> bool:
    """Whether each batch is one micro-batch of a window."""
    return _sizes(options) == 0 and options.accumulation_steps is not None


def _pools_statistics(network: nn.Cell) -> bool:
    return any(isinstance(cell, WindowBatchNorm) for _, cell in network.cells_and_names())


def _only_compiled(what: str, finds: str, argument: str, number: str) -> Rule:
    """What finds a size by itself is not run eagerly. `finds` : the property of the options that says whether it
    does."""
    return Rule(
        CELL,
        what,
        "`jit=False`",
        lambda s: getattr(s.options, finds) and s.options.jit is False,
        f"{argument} compiles in PyNative mode too, because MindSpore's eager gradient does not survive running out of "
        f"memory, but got jit=False. Leave 'jit' out, or give a number of {number}.",
        instead="leave `jit` out, or give a number",
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
        SPAN_LATER,
        SPAN_LATER,
        SEVERAL,
        lambda s: s.options.several_losses,
        "windows of several batches need a network of one loss, because one accumulator cannot be divided by several "
        "totals, but got one of several losses.",
        instead="larger batches and `micro_size`",
    ),
    Rule(
        SPAN_LATER,
        SPAN_LATER,
        BATCH_LOSS,
        lambda s: s.of_batch,
        "windows of several batches need a loss that is a mean or sum over micro-batches, but got a "
        "'WithBatchLossCell', whose loss needs all samples of the window at once: the first batches are gone when the "
        "last one comes. Use larger batches and a larger 'micro_size', which need no more memory.",
        instead="larger batches and `micro_size`",
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
        SPAN_LATER,
        SPAN_LATER,
        PIPELINE,
        lambda s: stages() > 1,
        "windows of several batches need a network on one stage, but got a pipeline: between two batches all stages "
        "would stand idle. Use larger batches and a larger 'micro_size', which need no more memory.",
        instead="larger batches and `micro_size`",
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
    _only_compiled(AUTO, "finds_size", "micro_batch_size='auto'", "samples"),
    Rule(
        CELL,
        AUTO,
        f"several losses, {BATCH_LOSS}",
        lambda s: s.options.finds_size and (s.options.several_losses or s.of_batch),
        "micro_batch_size='auto' needs one loss that is a mean or sum over samples, so that each rank can try a "
        "batch again by itself, but got {options.losses} loss(es) and a network of class '{network}'. Give the "
        "number of samples; "
        "'find_micro_batch_size' finds it for what is not a 'WithBatchLossCell'.",
        instead="a number; `find_micro_batch_size` finds it",
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
        instead="`dataset_sink_mode=False`, or what `find_micro_batch_size` returns",
    ),
    only_in_semi_auto(
        "micro_batch_size",
        None,
        "the compiler must know the number of micro-batches before it sees a batch; give 'micro_size'",
        instead="`micro_size`",
    ),
    Rule(
        AUDIT,
        AUTO,
        AUDIT,
        lambda s: s.options.finds_size,
        "the number of micro-batches must be given, because with it the batch is compared, but got "
        "micro_batch_size='auto'. Give 'micro_size', or a 'micro_batch_size' such as 'find_micro_batch_size' "
        "returns.",
        instead="`micro_size`, or what `find_micro_batch_size` returns",
    ),
    # -- accumulation_steps --
    Rule(
        PIPELINE,
        "`accumulation_steps`",
        PIPELINE,
        lambda s: s.options.accumulation_steps > 1,
        "in a pipeline 'accumulation_steps' must be 1, because between two batches all stages would stand idle, "
        "but got {options.accumulation_steps}. Use larger batches and a larger 'micro_size', which need no more "
        "memory.",
        instead="larger batches and `micro_size`",
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
        instead="larger batches and `micro_size`, or add losses up in the network",
    ),
    only_of_batch_loss(
        "accumulation_steps",
        1,
        "the loss needs all samples of the window at once, and the first batches of a window are gone when the "
        "last one comes; use larger batches and a larger 'micro_size', which need no more memory",
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
        f"`count`, {BATCH_LOSS}",
        lambda s: s.options.returns_ratio and (s.options.count is not None or s.of_batch),
        "with reduction='ratio' the network returns its numerator and what that is divided by, and nothing else "
        "says it, but got count={options.count} and a network of class '{network}'. Leave 'count' out; or return "
        "means or sums, and give reduction='mean' or 'sum'.",
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
    # -- count --
    Rule(
        CELL,
        "`count`",
        BATCH_LOSS,
        lambda s: s.of_batch and s.options.own_count is not None,
        "with a network of class 'WithBatchLossCell' the argument 'count' must be None, but got {options.count}: "
        "the loss is not a mean over micro-batches, which could weigh by their counts; 'loss_fn' itself divides by "
        "what it likes.",
        instead="divide in `loss_fn`",
    ),
    # -- min_count --
    Rule(
        CELL,
        "`min_count`",
        f"neither `count` nor {RATIO}, {BATCH_LOSS}",
        lambda s: s.options.min_count is not None and (not s.options.counts_items or s.of_batch),
        "'min_count' is the least count of items that a window is divided by, which needs a 'count' or "
        "reduction='ratio', but got min_count={options.min_count}, count={options.count}, "
        "reduction={options.reduction!r} and a network of class '{network}'. Leave it out, or give 'count' or a "
        "ratio.",
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
    only_of_batch_loss(
        "loss_weights",
        (1.0,),
        "add the losses up in 'loss_fn'",
        SEVERAL,
        instead="add the losses up in `loss_fn`",
    ),
    # -- transforms --
    Rule(
        UPDATE,
        "`SkipSpikes`",
        "`max_grad_norm`, or a `ClipByGlobalNorm` before it",
        lambda s: s.options.clips_before_spikes,
        "'SkipSpikes' must come before the gradient is clipped by its global norm, which leaves no spike to see, but "
        "got it behind 'max_grad_norm' or a 'ClipByGlobalNorm'. Give transforms=(SkipSpikes(...), "
        "ClipByGlobalNorm(...)), and leave 'max_grad_norm' out.",
        instead="`transforms=(SkipSpikes(...), ClipByGlobalNorm(...))`",
    ),
    Rule(
        SEMI_AUTO,
        "`transforms`: functions, `AdaptiveGradientClip`, and your own without `elementwise = True`",
        SEMI_AUTO,
        lambda s: bool(s.options.seeing_more_than_elements),
        "in semi-auto and auto parallel mode each of 'transforms' must treat each element of a gradient by itself, "
        "because a gradient is one device's part there, but got {options.seeing_more_than_elements}. Give a "
        "Transform whose class says elementwise = True; or ClipByGlobalNorm or SkipSpikes, which take the norm of "
        "all parts. 'AdaptiveGradientClip' needs the norms of rows, of which each may lie on several devices.",
        instead="`elementwise = True`, `ClipByGlobalNorm` or `SkipSpikes`",
    ),
    # -- accumulators --
    Rule(
        SEMI_AUTO,
        "`Accumulators(compensated=True)`, or of a lower precision than weights",
        SEMI_AUTO,
        lambda s: s.options.accumulators.compensated or s.accumulates_in_lower_precision,
        "in semi-auto and auto parallel mode the argument 'accumulators' must have compensated=False, and the "
        "precision of the weights at least, but got {options.accumulators}: the compiler's own pass adds the "
        "gradients; give Accumulators(mindspore.float32). Data parallel mode has no such limit.",
        instead="`Accumulators(mindspore.float32)`",
    ),
    # -- overflow --
    Rule(
        CELL,
        DROPS,
        "several losses, a sum without `count`",
        lambda s: s.options.drops and (s.options.several_losses or s.sum_without_count),
        "overflow='drop_micro_batch' divides what is left by its count, which must be one loss's mean, or a sum "
        "with 'count', but got {options.losses} loss(es), reduction={options.reduction!r} and "
        "count={options.count}. Use overflow='drop_window'.",
        instead='`overflow="drop_window"`',
    ),
    only_of_batch_loss(
        "overflow",
        "drop_window",
        "a micro-batch cannot be left out, because all others are compared with it",
        DROPS,
        instead='`overflow="drop_window"`',
    ),
    only_in_semi_auto(
        "overflow",
        "drop_window",
        "the compiler's own pass adds the gradients, and leaves none out",
        DROPS,
        instead='`overflow="drop_window"`',
    ),
    # -- record_noise --
    Rule(
        CELL,
        "`record_noise`",
        "several losses, a sum without `count`",
        lambda s: s.options.record_noise and (s.options.several_losses or s.sum_without_count),
        "'record_noise' compares the mean gradient of one micro-batch with the window's, which needs one loss "
        "that is a mean, or a sum with 'count', but got {options.losses} loss(es), "
        "reduction={options.reduction!r} and count={options.count}. Use reduction='mean', and add losses up in the "
        "network.",
        instead='`reduction="mean"`, and add losses up in the network',
    ),
    only_of_batch_loss(
        "record_noise",
        False,
        "a micro-batch's part of the gradient is not an estimate of the whole: it depends on all other samples",
        instead="leave it out: no part estimates the whole gradient",
    ),
    only_in_semi_auto(
        "record_noise",
        False,
        "the compiler's own pass adds the gradients, and none is seen",
        instead="data parallel mode",
    ),
    # -- aux --
    Rule(
        CELL,
        "`aux`",
        f"several losses, {BATCH_LOSS}",
        lambda s: s.options.aux and (s.options.several_losses or s.of_batch),
        "with aux=True the network must return one loss before its other outputs, from one forward of each "
        "micro-batch, but got {options.losses} loss(es) and a network of class '{network}'. Add losses up in the "
        "network, and return each as an output of shape (); of a 'WithBatchLossCell' call the backbone itself.",
        instead="return each loss as an output; call the backbone itself",
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
    _only_compiled(AUTO_TOKENS, "finds_tokens", "MaxTokens('auto', ...)", "tokens"),
    Rule(
        CELL,
        FUNCTION,
        f"several losses, {BATCH_LOSS}",
        lambda s: s.options.splits_in_python and (s.options.several_losses or s.of_batch),
        "a function as 'split' needs one loss that is a mean or sum over samples, because each rank adds "
        "micro-batches one at a time, as many as it has, but got {options.losses} loss(es) and a network of class "
        "'{network}'. Add losses up in the network, or use EvenSplit.",
        instead="add losses up in the network, or `EvenSplit`",
    ),
    Rule(
        IN_ONE_GRAPH,
        FUNCTION,
        IN_ONE_GRAPH,
        lambda s: s.options.splits_in_python,
        "a function as 'split' needs Python at each batch, which calls it, but the training step is part of "
        "another graph, as with data sinking. Use model.train(..., dataset_sink_mode=False), or EvenSplit.",
        RuntimeError,
        instead="`dataset_sink_mode=False`, or `EvenSplit`",
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
        SEMI_AUTO,
        "`split`: a function, or `EvenSplit(axis=...)`",
        SEMI_AUTO,
        lambda s: s.options.splits_in_python or s.options.axis != 0,
        "in semi-auto and auto parallel mode the argument 'split' must be None or EvenSplit(shared=...), but got "
        "{options.split!r}: the compiler itself cuts all inputs along axis 0. Data parallel mode has no such "
        "limit.",
        instead="`EvenSplit(shared=...)`",
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
        AUDIT,
        AUTO_TOKENS,
        AUDIT,
        lambda s: s.options.finds_tokens,
        "the number of tokens in a micro-batch must be given, because with it the batch is compared, but got "
        "MaxTokens('auto', ...). Give a number such as 'find_micro_batch_size' returns.",
        instead="a number, such as `find_micro_batch_size` returns",
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
