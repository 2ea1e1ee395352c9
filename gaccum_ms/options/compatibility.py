"""What goes together, and where: one table, the source of the errors and of the table in the docs."""

from __future__ import annotations

import mindspore as ms

from gaccum_ms.distributed.stages import stages
from gaccum_ms.options.options import Options, each_option
from gaccum_ms.options.rules import BATCH_LOSS, PIPELINE, SEMI_AUTO, SEVERAL, SPAN_LATER, TRIAL, Rule, Setup

# What a place refuses, whatever the options.
_OF_PLACES = (
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
    Rule(
        SPAN_LATER,
        SPAN_LATER,
        SEVERAL,
        lambda s: s.options.several_losses,
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
        PIPELINE,
        SEVERAL,
        PIPELINE,
        lambda s: s.options.several_losses,
        "in a pipeline the network must return one loss, because the totals of several are known too late, on the last "
        "stage and after its last micro-batch, but got {options.losses} losses. Return their weighted sum, or its "
        "numerator and denominator with reduction='ratio'.",
    ),
    Rule(
        SPAN_LATER,
        SPAN_LATER,
        PIPELINE,
        lambda s: stages() > 1,
        "windows of several batches need a network on one stage, but got a pipeline: between two batches all stages "
        "would stand idle. Use larger batches and a larger 'micro_size', which need no more memory.",
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
)

RULES = (*_OF_PLACES, *(rule for known in each_option(Options).values() for rule in known.rules))


def refused(place: str, owner: str, setup: Setup) -> Exception | None:
    """The error of the first rule that refuses the setup at this place; None if all options go together."""
    first = next((rule for rule in RULES if rule.place == place and rule.refuses(setup)), None)
    return None if first is None else first.error(first.message(owner, setup))


def check(place: str, owner: str, setup: Setup) -> None:
    """Raise what `refused` returns."""
    error = refused(place, owner, setup)
    if error is not None:
        raise error
