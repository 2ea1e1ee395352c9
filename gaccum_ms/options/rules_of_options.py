"""Which options of a cell go together."""

from __future__ import annotations

from mindspore import nn

from gaccum_ms.options.rules import (
    AUTO,
    AUTO_TOKENS,
    BATCH_LOSS,
    CELL,
    DROPS,
    FUNCTION,
    RATIO,
    SEVERAL,
    Rule,
    for_auto,
    one_value,
)

# For each option, the required value, and why.
_BESIDE_BATCH_LOSS = {
    "accumulation_steps": (
        1,
        "the loss needs all samples of the window at once, and the first batches of a window are gone when the last "
        "one comes; use larger batches and a larger 'micro_size', which need no more memory",
    ),
    "count": (
        None,
        "the loss is not a mean over micro-batches, which could weigh by their counts; 'loss_fn' itself divides by "
        "what it likes",
    ),
    "loss_weights": ((1.0,), "add the losses up in 'loss_fn'"),
    "record_noise": (
        False,
        "a micro-batch's part of the gradient is not an estimate of the whole: it depends on all other samples",
    ),
    "overflow": ("drop_window", "a micro-batch cannot be left out, because all others are compared with it"),
}


def _pools_statistics(network: nn.Cell) -> bool:
    """Whether a layer has WindowBatchNorm's record. Its class would make the longest chain of imports longer."""
    return any(one.name.endswith("window_statistics") for one in network.get_parameters())


OF_OPTIONS = (
    Rule(
        CELL,
        '`reduction="sum"`',
        "several losses, without a `count` for each",
        lambda s: s.o.reduction == "sum" and s.o.several_losses and None in s.o.counts,
        "reduction='sum' with 'loss_weights' needs a 'count' for each loss, but got count={o.count}. Give a count for "
        "each, or means.",
    ),
    Rule(
        CELL,
        RATIO,
        f"`count`, several losses, {BATCH_LOSS}",
        lambda s: s.o.returns_ratio and (s.o.count is not None or s.o.several_losses or s.of_batch),
        "with reduction='ratio' the network returns its numerator and what that is divided by, and nothing else says "
        "it, but got count={o.count}, {o.losses} loss(es) and a network of class '{network}'. Leave 'count' and "
        "'loss_weights' out; or return means or sums, and give reduction='mean' or 'sum'.",
    ),
    Rule(
        CELL,
        "`min_count`",
        f"neither `count` nor {RATIO}, {BATCH_LOSS}",
        lambda s: s.o.min_count is not None and (not s.o.counts_items or s.of_batch),
        "'min_count' is the least count of items that a window is divided by, which needs a 'count' or "
        "reduction='ratio', but got min_count={o.min_count}, count={o.count}, reduction='{o.reduction}' and a network "
        "of class '{network}'. Leave it out, or give 'count' or a ratio.",
    ),
    Rule(
        CELL,
        DROPS,
        "several losses, a sum without `count`",
        lambda s: s.o.drops and (s.o.several_losses or s.sum_without_count),
        "overflow='drop_micro_batch' divides what is left by its count, which must be one loss's mean, or a sum with "
        "'count', but got {o.losses} loss(es), reduction='{o.reduction}' and count={o.count}. Use "
        "overflow='drop_window'.",
    ),
    Rule(
        CELL,
        "`accumulation_steps`",
        SEVERAL,
        lambda s: s.o.accumulation_steps > 1 and s.o.several_losses,
        "'accumulation_steps' must be 1 for a network of several losses, because each is divided by a total of its "
        "own, which one accumulator cannot be once the first batches are in it, but got "
        "accumulation_steps={o.accumulation_steps} and {o.losses} losses. Use larger batches and 'micro_size'. Or add "
        "the losses up in the network: where one total serves all; or each divided by its window's total, which is an "
        "input of each batch that EvenSplit shares, with reduction='sum'.",
    ),
    Rule(
        CELL,
        "`shard_accumulators`",
        f"several losses, {DROPS}",
        lambda s: s.o.shard_accumulators and (s.o.several_losses or s.o.drops),
        "'shard_accumulators' reduces each micro-batch over all ranks, which needs one loss, and that no rank leaves a "
        "micro-batch out by itself, but got {o.losses} loss(es) and overflow='{o.overflow}'. Use "
        "overflow='drop_window', and add losses up in the network.",
    ),
    Rule(
        CELL,
        "`record_noise`",
        "several losses, `shard_accumulators`, a sum without `count`",
        lambda s: s.o.record_noise and (s.o.several_losses or s.o.shard_accumulators or s.sum_without_count),
        "'record_noise' compares the mean gradient of one micro-batch with the window's, which needs one loss that is "
        "a mean, or a sum with 'count', and whole accumulators, but got {o.losses} loss(es), "
        "reduction='{o.reduction}', count={o.count} and shard_accumulators={o.shard_accumulators}. Use "
        "reduction='mean', add losses up in the network, and leave 'shard_accumulators' out.",
    ),
    Rule(
        CELL,
        "`WindowBatchNorm`",
        "three or more losses with a `count`",
        lambda s: s.o.losses > 2 and s.o.own_count is not None and _pools_statistics(s.network),
        "'WindowBatchNorm' pools a micro-batch's statistics in each forward, and where one of three or more losses "
        "counts nothing, forward runs once for each other loss, but got {o.losses} losses. Add losses up in the "
        "network, or use nn.GroupNorm.",
    ),
    Rule(
        CELL,
        "`aux`",
        f"several losses, {BATCH_LOSS}",
        lambda s: s.o.aux and (s.o.several_losses or s.of_batch),
        "with aux=True the network must return one loss before its other outputs, from one forward of each "
        "micro-batch, but got {o.losses} loss(es) and a network of class '{network}'. Add losses up in the network, "
        "and return each as an output of shape (); of a 'WithBatchLossCell' call the backbone itself.",
    ),
    *(one_value(CELL, name, *rule) for name, rule in _BESIDE_BATCH_LOSS.items()),
    for_auto("memory_limit"),
    for_auto("is_out_of_memory"),
    Rule(
        CELL,
        AUTO,
        "`jit=False`",
        lambda s: s.o.finds_size and s.o.jit is False,
        "micro_batch_size='auto' compiles in PyNative mode too, because MindSpore's eager gradient does not survive "
        "running out of memory, but got jit=False. Leave 'jit' out, or give a number of samples.",
    ),
    Rule(
        CELL,
        AUTO,
        f"several losses, `shard_accumulators`, {BATCH_LOSS}",
        lambda s: s.o.finds_size and (s.o.several_losses or s.o.shard_accumulators or s.of_batch),
        "micro_batch_size='auto' needs one loss that is a mean or sum over samples, and whole accumulators, so that "
        "each rank can try a batch again by itself, but got {o.losses} loss(es), "
        "shard_accumulators={o.shard_accumulators} and a network of class '{network}'. Give the number of samples; "
        "'find_micro_batch_size' finds it for what is not a 'WithBatchLossCell'.",
    ),
    Rule(
        CELL,
        "`split=MaxTokens(...)`",
        "samples as weights: it needs `count`",
        lambda s: s.o.splits_in_python and s.o.split.needs_count and not s.o.counts_items,
        "'split' of class 'MaxTokens' fills micro-batches up with rows of padding, which must weigh nothing, but got "
        "count=None, by which they weigh as samples. Give a 'count' of tokens that are not padding, such as "
        "gaccum_ms.CountNotIgnored(), or reduction='ratio'.",
    ),
    Rule(
        CELL,
        AUTO_TOKENS,
        "`jit=False`",
        lambda s: s.o.finds_tokens and s.o.jit is False,
        "MaxTokens('auto', ...) compiles in PyNative mode too, because MindSpore's eager gradient does not survive "
        "running out of memory, but got jit=False. Leave 'jit' out, or give a number of tokens.",
    ),
    Rule(
        CELL,
        FUNCTION,
        f"several losses, `shard_accumulators`, {BATCH_LOSS}",
        lambda s: s.o.splits_in_python and (s.o.several_losses or s.o.shard_accumulators or s.of_batch),
        "a function as 'split' needs one loss that is a mean or sum over samples, and whole accumulators, because each "
        "rank adds micro-batches one at a time, as many as it has, but got {o.losses} loss(es), "
        "shard_accumulators={o.shard_accumulators} and a network of class '{network}'. Add losses up in the network, "
        "leave 'shard_accumulators' out, or use EvenSplit.",
    ),
)
