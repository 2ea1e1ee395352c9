"""Which options go together, and where: one table, of which the code makes its errors, and the docs their table."""

from __future__ import annotations

from typing import NamedTuple

import mindspore as ms
from mindspore import nn

from gaccum_ms.losses.batch_loss import WithBatchLossCell
from gaccum_ms.options import Options
from gaccum_ms.rule import (
    AUDIT,
    AUTO,
    BATCH_LOSS,
    CELL,
    DROPS,
    FUNCTION,
    IN_ONE_GRAPH,
    SEMI_AUTO,
    SEVERAL,
    SPAN_LATER,
    TRIAL,
    Rule,
    for_auto,
    one_value,
)


class Setup(NamedTuple):
    """What is to be trained, and how."""

    o: Options  # a short name: the table is full of it
    network: nn.Cell
    compiler_distributes: bool = False  # in semi-auto or auto parallel mode

    @property
    def of_batch(self) -> bool:
        """Whether the loss is one of the whole batch."""
        return isinstance(self.network, WithBatchLossCell)

    @property
    def sum_without_count(self) -> bool:
        """Whether the loss is a sum of which nothing says over how many items it is."""
        return not self.o.loss_is_mean and self.o.count is None


# Of each option the value that it must have, and why.
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
_IN_SEMI_AUTO = {
    "micro_batch_size": (
        None,
        "the compiler must know the number of micro-batches before it sees a batch; give 'micro_size'",
    ),
    "accumulation_steps": (
        1,
        "the compiler reduces over devices at the end of each batch's backward; give larger batches and a larger "
        "'micro_size', which need no more memory",
    ),
    "compensated": (
        False,
        "the compiler's own pass adds the gradients; give accumulator_dtype=mindspore.float32",
    ),
    "shard_accumulators": (
        False,
        "the compiler shards accumulators itself, with 'gradient_accumulation_shard' in parallel_optimizer_config",
    ),
    "overflow": ("drop_window", "the compiler's own pass adds the gradients, and leaves none out"),
    "record_noise": (False, "the compiler's own pass adds the gradients, and none is seen"),
    "loss_weights": ((1.0,), "the compiler knows one loss; add them up in the network"),
}

RULES = (
    Rule(
        CELL,
        '`reduction="sum"`',
        "several losses, without a `count` for each",
        lambda s: not s.o.loss_is_mean and s.o.several_losses and None in s.o.counts,
        "reduction='sum' with 'loss_weights' needs a 'count' for each loss, but got count={o.count}. Give a count for "
        "each, or means.",
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
        "accumulation_steps={o.accumulation_steps} and {o.losses} losses. Use larger batches and 'micro_size'; or add "
        "the losses up in the network, where one total serves all.",
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
        IN_ONE_GRAPH,
        AUTO,
        IN_ONE_GRAPH,
        lambda s: s.o.finds_size,
        "micro_batch_size='auto' needs Python between the batches, to try again what ran out of memory, but the "
        "training step is part of another graph, as with data sinking. Use model.train(..., dataset_sink_mode=False), "
        "or the number that gaccum_ms.find_micro_batch_size returns.",
        RuntimeError,
    ),
    Rule(
        SEMI_AUTO,
        "PyNative mode",
        SEMI_AUTO,
        lambda s: ms.get_context("mode") != ms.GRAPH_MODE,
        "semi-auto and auto parallel mode need graph mode, because the compiler distributes graphs, but got PyNative "
        "mode. Use ms.set_context(mode=ms.GRAPH_MODE).",
        RuntimeError,
    ),
    Rule(
        SEMI_AUTO,
        BATCH_LOSS,
        SEMI_AUTO,
        lambda s: s.of_batch,
        "in semi-auto and auto parallel mode the compiler's own passes accumulate, which take each micro-batch once, "
        "but got a network of class 'WithBatchLossCell', whose micro-batches go forward twice. Use data parallel mode, "
        "with gather_ranks=True where the loss is to see the samples of all devices.",
    ),
    *(one_value(SEMI_AUTO, name, *rule) for name, rule in _IN_SEMI_AUTO.items()),
    Rule(
        SPAN_LATER,
        SPAN_LATER,
        SEMI_AUTO,
        lambda s: s.compiler_distributes,
        "windows of several batches need accumulators that outlive a batch, but in semi-auto and auto parallel mode "
        "the compiler reduces over devices at the end of each batch's backward. Use data parallel mode; or larger "
        "batches and a larger 'micro_size', which need no more memory.",
        RuntimeError,
    ),
    Rule(
        SPAN_LATER,
        SPAN_LATER,
        SEVERAL,
        lambda s: s.o.several_losses,
        "windows of several batches need a network of one loss, because one accumulator cannot be divided by several "
        "totals, but got one of several losses.",
    ),
    Rule(
        SPAN_LATER,
        SPAN_LATER,
        BATCH_LOSS,
        lambda s: s.of_batch,
        "windows of several batches need a loss that is a mean or sum over micro-batches, but got a "
        "'WithBatchLossCell', whose loss needs all samples of the window at once: the first batches are gone when the "
        "last one comes. Use larger batches and a larger 'micro_size', which need no more memory.",
    ),
    Rule(
        AUDIT,
        AUTO,
        AUDIT,
        lambda s: s.o.finds_size,
        "the number of micro-batches must be given, because with it the batch is compared, but got "
        "micro_batch_size='auto'. Give 'micro_size', or a 'micro_batch_size' such as 'find_micro_batch_size' returns.",
    ),
    Rule(
        TRIAL,
        TRIAL,
        BATCH_LOSS,
        lambda s: s.of_batch,
        "the network of 'cell' must have a loss that one micro-batch can be tried with, but got a 'WithBatchLossCell', "
        "whose loss needs all samples, and with 'gather_ranks' all ranks. Ask about its backbone, with any loss: "
        "intermediate values of the backbone are what grows with micro-batches.",
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
    Rule(
        CELL,
        "`split=MaxTokens(...)`",
        "samples as weights: it needs `count`",
        lambda s: getattr(s.o.split, "needs_count", False) and s.o.own_count is None,
        "'split' of class 'MaxTokens' fills micro-batches up with rows of padding, which must weigh nothing, but got "
        "count=None, by which they weigh as samples. Give a 'count' of tokens that are not padding, such as "
        "gaccum_ms.CountNotIgnored().",
    ),
    Rule(
        IN_ONE_GRAPH,
        FUNCTION,
        IN_ONE_GRAPH,
        lambda s: s.o.splits_in_python,
        "a function as 'split' needs Python at each batch, which calls it, but the training step is part of another "
        "graph, as with data sinking. Use model.train(..., dataset_sink_mode=False), or EvenSplit.",
        RuntimeError,
    ),
    Rule(
        SEMI_AUTO,
        "`split`, but for `EvenSplit()`",
        SEMI_AUTO,
        lambda s: s.o.splits_in_python or bool(s.o.shared),
        "in semi-auto and auto parallel mode the argument 'split' must be None or EvenSplit(), but got {o.split!r}: "
        "the compiler itself cuts all inputs along axis 0. Data parallel mode has no such limit.",
    ),
    Rule(
        AUDIT,
        FUNCTION,
        AUDIT,
        lambda s: s.o.splits_in_python and not s.o.trims,
        "the batch must be the network's inputs, so that the whole batch can be trained with too, but got a function "
        "as 'split': only the function is known to make inputs of it. Train one step each with this function and with "
        "one that returns the batch as one micro-batch, and compare the weights.",
    ),
    Rule(
        TRIAL,
        TRIAL,
        FUNCTION,
        lambda s: s.o.splits_in_python,
        "micro-batches must be so many samples of the batch, of which other numbers can be tried, but got a function "
        "as 'split': only the function is known to make micro-batches. Ask about a cell with 'micro_size', and a batch "
        "as large as the function's largest micro-batch.",
    ),
)


def refused(place: str, owner: str, setup: Setup) -> Exception | None:
    """The error for the first thing that a place refuses; None if all goes together."""
    first = next((rule for rule in RULES if rule.place == place and rule.refuses(setup)), None)
    return None if first is None else first.error(first.message(owner, setup))


def check(place: str, owner: str, setup: Setup) -> None:
    """Raise what `refused` returns."""
    error = refused(place, owner, setup)
    if error is not None:
        raise error
