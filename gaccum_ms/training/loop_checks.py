"""What a GradAccumulator refuses, or warns of: batches that do not go together, losses without their scale, what cannot
be compiled, and graphs around it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mindspore as ms

from gaccum_ms.backend import graphs
from gaccum_ms.backend.user_warnings import warn_user
from gaccum_ms.record.run_record import RULES

_NAME = "GradAccumulator"
NEEDS_COUNT = (
    "For 'GradAccumulator', with 'min_count', or overflow='drop_micro_batch' and losses that are sums, each call must "
    "have a 'count', the number of items in its batch, by whose total the gradients are divided, but got none. Nothing "
    "was added."
)


class Scaling:
    """Whether losses are multiplied by the loss scale. It is a separate object, so that the accumulator does not refer
    to itself: when such a cell is garbage-collected, MindSpore compiles another cell's graph a second time."""

    def __init__(self, needed: bool) -> None:
        self.missing = needed

    def note(self) -> None:
        self.missing = False

    def check(self) -> None:
        if self.missing:
            raise RuntimeError(
                "For 'GradAccumulator', losses must be multiplied by the loss scale before they are differentiated, "
                "because 'scale_sense' was given and gradients are divided by it, but neither 'scale' was called nor "
                "'scale_sense' read. Nothing was added. Differentiate accumulator.scale(loss), or leave 'scale_sense' "
                "out."
            )


def refuse_graphs() -> None:
    raise RuntimeError(
        f"For '{_NAME}', with 'scheduler' the accumulator must be called by Python, which steps it, but it is part of "
        f"another graph, as in a function with mindspore.jit. Leave 'scheduler' out, and step it yourself."
    )


def can_compile(functions: Iterable[Any]) -> bool:
    """Whether PyNative mode can compile the accumulator with these; says why not. In graph mode it must."""
    problem = None if graphs.runs_eagerly(jit=True) else graphs.uncompilable(functions)
    if problem is not None and ms.get_context("mode") == ms.PYNATIVE_MODE:
        warn_user(
            f"For '{_NAME}', 'transforms' and the optimizer are compiled from their lines of source, but got "
            f"{problem}. So the accumulator runs eagerly, which takes longer. Define it by 'def' or 'class' in a file, "
            f"or give jit=False."
        )
        return False
    return True


def check_rule(rule: int, rule_of_window: int, batches: int, count: Any) -> None:
    """Refuse a batch that weighs by another rule than the `batches` of its window."""
    if batches and rule != rule_of_window:
        raise ValueError(
            f"For '{_NAME}', 'count' must be given with every batch of a window or with none, and each batch's "
            f"gradients be of 'value_and_grad' or none's, but got count={count} and gradients that weigh by "
            f"{RULES[rule]} after {batches} batch(es) that weigh by {RULES[rule_of_window]}. Nothing was added."
        )
