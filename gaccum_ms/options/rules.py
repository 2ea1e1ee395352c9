"""The rules of the table in compatibility.py, and the docs' words that several rules share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mindspore as ms

if TYPE_CHECKING:
    from gaccum_ms.options.compatibility import Setup

# The places at which something is refused, in the docs' words.
CELL = "the cell"
SEMI_AUTO = "semi-auto and auto parallel mode"
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
    text: str  # {o}: the options, {network}: its class, {mode}: the parallel mode
    error: type[Exception] = ValueError

    def message(self, owner: str, setup: Setup) -> str:
        """The whole text; `owner` is the class that it names."""
        mode = ms.get_auto_parallel_context("parallel_mode")
        text = self.text.format(o=setup.o, network=type(setup.network).__name__, mode=mode)
        return f"For '{owner}', {text}"


def one_value(place: str, name: str, allowed: Any, why: str) -> Rule:
    """A rule that an option must have one value, at a place, or with a WithBatchLossCell."""
    semi_auto = place == SEMI_AUTO
    where = f"in {place}" if semi_auto else "with a network of class 'WithBatchLossCell'"
    more = " Data parallel mode has no such limit." * semi_auto
    given = "own_count" if name == "count" else name
    return Rule(
        place,
        {"overflow": DROPS, "loss_weights": SEVERAL}.get(name, f"`{name}`"),
        SEMI_AUTO if semi_auto else BATCH_LOSS,
        lambda s: (semi_auto or s.of_batch) and getattr(s.o, given) != allowed,
        f"{where} the argument '{name}' must be {allowed!r}, but got {{o.{given}!r}}: {why}.{more}",
    )


def for_auto(name: str) -> Rule:
    return Rule(
        CELL,
        f"`{name}`",
        f"no {AUTO}, and no {AUTO_TOKENS}",
        lambda s: not s.o.searches and getattr(s.o, name) is not None,
        f"the argument '{name}' is for micro_batch_size='auto' or split=MaxTokens('auto', ...), but got "
        f"{name}={{o.{name}!r}} and micro_batch_size={{o.micro_batch_size!r}}. Leave it out, or give 'auto'.",
    )
