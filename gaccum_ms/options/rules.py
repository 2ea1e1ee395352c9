"""A rule that something does not go together, and the docs' words that several rules share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mindspore as ms

if TYPE_CHECKING:
    from gaccum_ms.options.compatibility import Setup

# The places at which something is refused, in the docs' words.
LOSS = "a known loss"
CELL = "the cell"
SEMI_AUTO = "semi-auto and auto parallel mode"
PIPELINE = "a pipeline"
IN_LOOPS = "stand-alone and data parallel mode"
SPAN_LATER = "`AccumulationScheduler`, `set_accumulation_steps`"
IN_ONE_GRAPH = "data sinking"
AUDIT = "`audit`"
TRIAL = "`find_micro_batch_size`, `memory_report`"
REPORT = "`memory_report`"

# The docs' words for options that several rules name.
BATCH_LOSS = "`WithBatchLossCell`"
AUTO = '`micro_batch_size="auto"`'
DROPS = '`overflow="drop_micro_batch"`'
SEVERAL = "several losses"
FUNCTION = "`split`, a function"
AUTO_TOKENS = '`split=MaxTokens("auto", ...)`'
RATIO = '`reduction="ratio"`'


@dataclass(frozen=True)
class Rule:
    """A refused combination, and the error's text: "<what must be>, but <what is>: <why>. <remedy>" ."""

    place: str
    what: str  # the option, in the docs' words
    beside: str  # the options that do not go with it, likewise
    refuses: Callable[[Setup], bool]
    text: str  # {options}, {stated}: what its loss says, {network}: its class, {mode}: the parallel mode
    error: type[Exception] = ValueError

    def message(self, owner: str, setup: Setup) -> str:
        """The whole text; `owner` is the class that it names."""
        mode = ms.get_auto_parallel_context("parallel_mode")
        network = type(setup.network).__name__
        text = self.text.format(options=setup.options, stated=setup.stated, network=network, mode=mode)
        return f"For '{owner}', {text}"


def only_in_semi_auto(name: str, allowed: Any, why: str, what: str | None = None) -> Rule:
    """In semi-auto and auto parallel mode the option must have this value. `what` : the option, in the docs' words."""
    return Rule(
        SEMI_AUTO,
        what or f"`{name}`",
        SEMI_AUTO,
        lambda s: getattr(s.options, name) != allowed,
        f"in {SEMI_AUTO} the argument '{name}' must be {allowed!r}, but got {{options.{name}!r}}: {why}. Data parallel "
        f"mode has no such limit.",
    )


def only_of_batch_loss(name: str, allowed: Any, why: str, what: str | None = None) -> Rule:
    """With a loss of the whole batch the option must have this value. `what` : the option, in the docs' words."""
    return Rule(
        CELL,
        what or f"`{name}`",
        BATCH_LOSS,
        lambda s: s.of_batch and getattr(s.options, name) != allowed,
        f"with a network of class 'WithBatchLossCell' the argument '{name}' must be {allowed!r}, but got "
        f"{{options.{name}!r}}: {why}.",
    )
