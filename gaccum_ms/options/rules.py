"""A training's setup, a rule that something in it does not go together, and the docs' words that several rules
share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mindspore as ms
from mindspore import nn

from gaccum_ms.losses.batch_loss import WithBatchLossCell
from gaccum_ms.losses.stated_reduction import StatedReduction, stated_reduction
from gaccum_ms.options.options import Options

# The places at which something is refused, in the docs' words.
GIVEN = "the options as they are given"
LOSS = "a known loss"
CELL = "the cell"
SEMI_AUTO = "semi-auto and auto parallel mode"
PIPELINE = "a pipeline"
UPDATE = "the finished gradient"
IN_LOOPS = "stand-alone and data parallel mode"
IN_ONE_GRAPH = "data sinking"
AUDIT = "`audit`"
TRIAL = "`find_micro_batch_size`, `memory_report`"
REPORT = "`memory_report`"

# The docs' words for options that several rules name.
BATCH_LOSS = "`WithBatchLossCell`"
AUTO = '`micro_batch_size="auto"`'
AUTO_TOKENS = '`MaxTokens("auto", ...)`'
STEPS = "`accumulation_steps`, `AccumulationScheduler`"
DROPS = '`overflow="drop_micro_batch"`'
SEVERAL = "several losses"
FUNCTION = "a function as `split`"
RATIO = '`reduction="ratio"`'


class Setup(NamedTuple):
    """The network and the options of a training."""

    options: Options
    network: nn.Cell  # of an accumulator, the function that is differentiated
    compiler_distributes: bool = False  # in semi-auto or auto parallel mode

    @property
    def of_batch(self) -> bool:
        """Whether the loss needs the whole batch."""
        return isinstance(self.network, WithBatchLossCell)

    @property
    def stated(self) -> StatedReduction | None:
        """What the network's only loss says of itself, if its value is all that the network returns."""
        options = self.options
        returns_more = options.aux or options.losses > 1 or options.returns_ratio
        return None if returns_more else stated_reduction(self.network)

    @property
    def contradicts_loss(self) -> bool:
        """Whether another `reduction` is given than that of the loss."""
        given, stated = self.options.reduction, self.stated
        if given is None or stated is None or not stated.is_certain:
            return False
        return stated.reduction not in ("none", given)

    @property
    def known_reduction(self) -> str | None:
        """The given `reduction` , else that of the loss; None if the loss says none that trains."""
        given, stated = self.options.reduction, self.stated
        if given is not None or stated is None or stated.reduction == "none":
            return given
        return stated.reduction

    @property
    def accumulates_in_lower_precision(self) -> bool:
        """Whether there are accumulators, and they have a lower precision than a weight."""
        options, dtype = self.options, self.options.accumulators.dtype
        accumulates = (options.micro_size or 1) > 1 or (options.accumulation_steps or 1) > 1
        is_low = dtype in (ms.float16, ms.bfloat16)
        return accumulates and is_low and any(weight.dtype != dtype for weight in self.network.trainable_params())


@dataclass(frozen=True)
class Rule:
    """A refused combination, and the error's text: "<what must be>, but <what is>: <why>. <remedy>" ."""

    place: str
    what: str  # the option, in the docs' words
    beside: str  # the options that do not go with it, likewise
    refuses: Callable[[Setup], Any]
    text: str  # {refused}: what `refuses` returns, {options}, {stated}: what the loss says, {mode}: the parallel mode
    error: type[Exception] = ValueError
    instead: str = field(kw_only=True)  # for the docs: what to write, in ten words

    def message(self, owner: str, setup: Setup) -> str:
        """The whole text; `owner` is the class that it names."""
        mode = ms.get_auto_parallel_context("parallel_mode")
        refused = self.refuses(setup)
        text = self.text.format(refused=refused, options=setup.options, stated=setup.stated, mode=mode)
        return f"For '{owner}', {text}"
