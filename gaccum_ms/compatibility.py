"""Which options go together, and where: one table, of which the code makes its errors, and the docs their table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import mindspore as ms
from mindspore import nn

from gaccum_ms.losses.batch_loss import WithBatchLossCell
from gaccum_ms.options import Options

# Where something is refused: in the docs' words.
CELL = "the cell"
SEMI_AUTO = "semi-auto and auto parallel mode"
SPAN_LATER = "`AccumulationScheduler`, `set_accumulation_steps`"
IN_ONE_GRAPH = "data sinking"
AUDIT = "`audit`"
TRIAL = "`find_micro_batch_size`, `memory_report`"


class Setup(NamedTuple):
    """What is to be trained, and how."""

    options: Options
    network: nn.Cell
    compiler_distributes: bool = False  # in semi-auto or auto parallel mode

    @property
    def of_batch(self) -> bool:
        """Whether the loss is one of the whole batch."""
        return isinstance(self.network, WithBatchLossCell)


@dataclass(frozen=True)
class Rule:
    """What is refused, and the error: "For '<owner>', <needs>, but <got>: <why>. <remedy>"."""

    place: str
    what: str  # as the docs call it
    beside: str  # what it does not go with, likewise
    refuses: Callable[[Setup], bool]
    needs: str
    got: str  # {o}: the options, {network}: its class, {mode}: the parallel mode
    why: str = ""
    remedy: str = ""
    error: type[Exception] = ValueError

    def message(self, owner: str, setup: Setup) -> str:
        """The error's text; `owner` is the class that it names."""
        mode = ms.get_auto_parallel_context("parallel_mode")
        got = self.got.format(o=setup.options, network=type(setup.network).__name__, mode=mode)
        return f"For '{owner}', {self.needs}, but {got}{': ' * bool(self.why)}{self.why}. {self.remedy}".rstrip()


def _beside_batch_loss(what: str, name: str, allowed: Any, why: str, given: str = "") -> Rule:
    given = given or name
    return Rule(
        CELL,
        what,
        "`WithBatchLossCell`",
        lambda setup: setup.of_batch and getattr(setup.options, given) != allowed,
        f"with a network of class 'WithBatchLossCell' the argument '{name}' must be {allowed!r}",
        f"got {{o.{given}!r}}",
        why,
    )


def _for_auto(name: str) -> Rule:
    return Rule(
        CELL,
        f"`{name}`",
        'no `micro_batch_size="auto"`',
        lambda setup: not setup.options.finds_size and getattr(setup.options, name) is not None,
        f"the argument '{name}' is for micro_batch_size='auto'",
        f"got {name}={{o.{name}!r}} and micro_batch_size={{o.micro_batch_size!r}}",
        remedy="Leave it out, or give 'auto'.",
    )


def _in_semi_auto(what: str, name: str, allowed: Any, why: str) -> Rule:
    return Rule(
        SEMI_AUTO,
        what,
        SEMI_AUTO,
        lambda setup: getattr(setup.options, name) != allowed,
        f"in {SEMI_AUTO} the argument '{name}' must be {allowed!r}",
        f"got {{o.{name}!r}}",
        why,
        "Data parallel mode has no such limit.",
    )


def _sum_without_count(options: Options) -> bool:
    return not options.loss_is_mean and options.count is None


RULES = (
    Rule(
        CELL,
        '`reduction="sum"`',
        "several losses, without a `count` for each",
        lambda setup: not setup.options.loss_is_mean and setup.options.several_losses and None in setup.options.counts,
        "reduction='sum' with 'loss_weights' needs a 'count' for each loss",
        "got count={o.count}",
        remedy="Give a count for each, or means.",
    ),
    Rule(
        CELL,
        '`overflow="drop_micro_batch"`',
        "several losses, a sum without `count`",
        lambda setup: setup.options.drops and (setup.options.several_losses or _sum_without_count(setup.options)),
        "overflow='drop_micro_batch' divides what is left by its count, which must be one loss's mean, or a sum with "
        "'count'",
        "got {o.losses} loss(es), reduction='{o.reduction}' and count={o.count}",
        remedy="Use overflow='drop_window'.",
    ),
    Rule(
        CELL,
        "`accumulation_steps`",
        "several losses",
        lambda setup: setup.options.accumulation_steps > 1 and setup.options.several_losses,
        "'accumulation_steps' must be 1 for a network of several losses, because each is divided by a total of its "
        "own, which one accumulator cannot be once the first batches are in it",
        "got accumulation_steps={o.accumulation_steps} and {o.losses} losses",
        remedy="Use larger batches and 'micro_size'; or add the losses up in the network, where one total serves all.",
    ),
    Rule(
        CELL,
        "`shard_accumulators`",
        'several losses, `overflow="drop_micro_batch"`',
        lambda setup: setup.options.shard_accumulators and (setup.options.several_losses or setup.options.drops),
        "'shard_accumulators' reduces each micro-batch over all ranks, which needs one loss, and that no rank leaves a "
        "micro-batch out by itself",
        "got {o.losses} loss(es) and overflow='{o.overflow}'",
        remedy="Use overflow='drop_window', and add losses up in the network.",
    ),
    Rule(
        CELL,
        "`record_noise`",
        "several losses, `shard_accumulators`, a sum without `count`",
        lambda setup: (
            setup.options.record_noise
            and (setup.options.several_losses or setup.options.shard_accumulators or _sum_without_count(setup.options))
        ),
        "'record_noise' compares the mean gradient of one micro-batch with the window's, which needs one loss that is "
        "a mean, or a sum with 'count', and whole accumulators",
        "got {o.losses} loss(es), reduction='{o.reduction}', count={o.count} and "
        "shard_accumulators={o.shard_accumulators}",
        remedy="Use reduction='mean', add losses up in the network, and leave 'shard_accumulators' out.",
    ),
    _beside_batch_loss(
        "`accumulation_steps`",
        "accumulation_steps",
        1,
        "the loss needs all samples of the window at once, and the first batches of a window are gone when the last "
        "one comes; use larger batches and a larger 'micro_size', which need no more memory",
    ),
    _beside_batch_loss(
        "`count`",
        "count",
        None,
        "the loss is not a mean over micro-batches, which could weigh by their counts; 'loss_fn' itself divides by "
        "what it likes",
        given="own_count",
    ),
    _beside_batch_loss("several losses", "loss_weights", (1.0,), "add the losses up in 'loss_fn'"),
    _beside_batch_loss(
        "`record_noise`",
        "record_noise",
        False,
        "a micro-batch's part of the gradient is not an estimate of the whole: it depends on all other samples",
    ),
    _beside_batch_loss(
        '`overflow="drop_micro_batch"`',
        "overflow",
        "drop_window",
        "a micro-batch cannot be left out, because all others are compared with it",
    ),
    _for_auto("memory_limit"),
    _for_auto("is_out_of_memory"),
    Rule(
        CELL,
        '`micro_batch_size="auto"`',
        "`jit=False`",
        lambda setup: setup.options.finds_size and setup.options.jit is False,
        "micro_batch_size='auto' compiles in PyNative mode too, because MindSpore's eager gradient does not survive "
        "running out of memory",
        "got jit=False",
        remedy="Leave 'jit' out, or give a number of samples.",
    ),
    Rule(
        CELL,
        '`micro_batch_size="auto"`',
        "several losses, `shard_accumulators`, `WithBatchLossCell`",
        lambda setup: (
            setup.options.finds_size
            and (setup.options.several_losses or setup.options.shard_accumulators or setup.of_batch)
        ),
        "micro_batch_size='auto' needs one loss that is a mean or sum over samples, and whole accumulators, so that "
        "each rank can try a batch again by itself",
        "got {o.losses} loss(es), shard_accumulators={o.shard_accumulators} and a network of class '{network}'",
        remedy="Give the number of samples; 'find_micro_batch_size' finds it for what is not a 'WithBatchLossCell'.",
    ),
    Rule(
        IN_ONE_GRAPH,
        '`micro_batch_size="auto"`',
        IN_ONE_GRAPH,
        lambda setup: setup.options.finds_size,
        "micro_batch_size='auto' needs Python between the batches, to try again what ran out of memory",
        "the training step is part of another graph, as with data sinking",
        remedy="Use model.train(..., dataset_sink_mode=False), or the number that gaccum_ms.find_micro_batch_size "
        "returns.",
        error=RuntimeError,
    ),
    Rule(
        SEMI_AUTO,
        "PyNative mode",
        SEMI_AUTO,
        lambda setup: ms.get_context("mode") != ms.GRAPH_MODE,
        "semi-auto and auto parallel mode need graph mode, because the compiler distributes graphs",
        "got PyNative mode",
        remedy="Use ms.set_context(mode=ms.GRAPH_MODE).",
        error=RuntimeError,
    ),
    Rule(
        SEMI_AUTO,
        "`WithBatchLossCell`",
        SEMI_AUTO,
        lambda setup: setup.of_batch,
        "in semi-auto and auto parallel mode the compiler's own passes accumulate, which take each micro-batch once",
        "got a network of class 'WithBatchLossCell', whose micro-batches go forward twice",
        remedy="Use data parallel mode, with gather_ranks=True where the loss is to see the samples of all devices.",
    ),
    _in_semi_auto(
        "`micro_batch_size`",
        "micro_batch_size",
        None,
        "the compiler must know the number of micro-batches before it sees a batch; give 'micro_size'",
    ),
    _in_semi_auto(
        "`accumulation_steps`",
        "accumulation_steps",
        1,
        "the compiler reduces over devices at the end of each batch's backward; give larger batches and a larger "
        "'micro_size', which need no more memory",
    ),
    _in_semi_auto(
        "`compensated`",
        "compensated",
        False,
        "the compiler's own pass adds the gradients; give accumulator_dtype=mindspore.float32",
    ),
    _in_semi_auto(
        "`shard_accumulators`",
        "shard_accumulators",
        False,
        "the compiler shards accumulators itself, with 'gradient_accumulation_shard' in parallel_optimizer_config",
    ),
    _in_semi_auto(
        '`overflow="drop_micro_batch"`',
        "overflow",
        "drop_window",
        "the compiler's own pass adds the gradients, and leaves none out",
    ),
    _in_semi_auto(
        "`record_noise`", "record_noise", False, "the compiler's own pass adds the gradients, and none is seen"
    ),
    _in_semi_auto("several losses", "loss_weights", (1.0,), "the compiler knows one loss; add them up in the network"),
    Rule(
        SPAN_LATER,
        SPAN_LATER,
        SEMI_AUTO,
        lambda setup: setup.compiler_distributes,
        "windows of several batches need accumulators that outlive a batch",
        "in semi-auto and auto parallel mode the compiler reduces over devices at the end of each batch's backward",
        remedy="Use data parallel mode; or larger batches and a larger 'micro_size', which need no more memory.",
        error=RuntimeError,
    ),
    Rule(
        SPAN_LATER,
        SPAN_LATER,
        "several losses",
        lambda setup: setup.options.several_losses,
        "windows of several batches need a network of one loss, because one accumulator cannot be divided by several "
        "totals",
        "got one of several losses",
    ),
    Rule(
        SPAN_LATER,
        SPAN_LATER,
        "`WithBatchLossCell`",
        lambda setup: setup.of_batch,
        "windows of several batches need a loss that is a mean or sum over micro-batches",
        "got a 'WithBatchLossCell', whose loss needs all samples of the window at once",
        "the first batches are gone when the last one comes",
        "Use larger batches and a larger 'micro_size', which need no more memory.",
    ),
    Rule(
        AUDIT,
        '`micro_batch_size="auto"`',
        AUDIT,
        lambda setup: setup.options.finds_size,
        "the number of micro-batches must be given, because with it the batch is compared",
        "got micro_batch_size='auto'",
        remedy="Give 'micro_size', or a 'micro_batch_size' such as 'find_micro_batch_size' returns.",
    ),
    Rule(
        TRIAL,
        TRIAL,
        "`WithBatchLossCell`",
        lambda setup: setup.of_batch,
        "the network of 'cell' must have a loss that one micro-batch can be tried with",
        "got a 'WithBatchLossCell', whose loss needs all samples, and with 'gather_ranks' all ranks",
        remedy="Ask about its backbone, with any loss: intermediate values of the backbone are what grows with "
        "micro-batches.",
    ),
    Rule(
        TRIAL,
        TRIAL,
        SEMI_AUTO,
        lambda setup: setup.compiler_distributes,
        "the parallel mode must be 'stand_alone' or 'data_parallel'",
        "got '{mode}'",
        "there the compiler lays a graph out over all devices, and no rank can try its part alone",
        "Look at 'mindspore.runtime.max_memory_allocated()' after a step.",
        RuntimeError,
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


def markdown() -> str:
    """The table of the docs."""
    rows = [(rule.what, rule.beside, f"{rule.why or rule.needs}. {rule.remedy}".rstrip()) for rule in RULES]
    lines = [("what", "does not go with", "because, and what to do instead"), ("---",) * 3, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
