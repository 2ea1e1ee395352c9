"""Which options are allowed where: data sinking, semi-auto mode, audits, trials, windows that span batches later."""

from __future__ import annotations

import mindspore as ms

from gaccum_ms.options.rules import (
    AUDIT,
    AUTO,
    AUTO_TOKENS,
    BATCH_LOSS,
    FUNCTION,
    IN_ONE_GRAPH,
    RATIO,
    REPORT,
    SEMI_AUTO,
    SEVERAL,
    SPAN_LATER,
    TRIAL,
    Rule,
    one_value,
)

# For each option, the required value, and why.
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
    "transforms": ((), "a gradient is one device's part there; 'max_grad_norm' clips by the norm of the whole"),
    "record_noise": (False, "the compiler's own pass adds the gradients, and none is seen"),
    "aux": (False, "the compiler's graph of a batch returns its loss alone; leave other outputs out"),
    "loss_weights": ((1.0,), "the compiler knows one loss; add them up in the network"),
}

OF_PLACES = (
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
        SEMI_AUTO,
        RATIO,
        SEMI_AUTO,
        lambda s: s.o.returns_ratio,
        "in semi-auto and auto parallel mode the argument 'reduction' must be 'mean' or 'sum', but got 'ratio': the "
        "compiler runs each micro-batch's backward before it runs the next one's forward, so that the sum of all "
        "denominators comes too late. Give 'count', a function of the network's inputs. Data parallel mode has no such "
        "limit.",
    ),
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
        lambda s: s.o.splits_in_python or bool(s.o.shared) or s.o.axis != 0,
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
        lambda s: s.o.splits_in_python and not s.o.trims,
        "micro-batches must be so many samples of the batch, of which other numbers can be tried, but got a function "
        "as 'split': only the function is known to make micro-batches. Ask about a cell with 'micro_size', and a batch "
        "as large as the function's largest micro-batch.",
    ),
    Rule(
        AUDIT,
        AUTO_TOKENS,
        AUDIT,
        lambda s: s.o.finds_tokens,
        "the number of tokens in a micro-batch must be given, because with it the batch is compared, but got "
        "MaxTokens('auto', ...). Give a number such as 'find_micro_batch_size' returns.",
    ),
    Rule(
        REPORT,
        REPORT,
        "`split=MaxTokens(...)`",
        lambda s: s.o.splits_in_python,
        "micro-batches must be so many samples of the batch, of which each number is a row of the report, but got "
        "'split' of class 'MaxTokens', whose micro-batches are so many tokens. 'find_micro_batch_size' finds how many "
        "fit.",
    ),
)
