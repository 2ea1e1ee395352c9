"""Checks of one option by itself. Each is given the class in errors, the option's name, and its value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from gaccum_ms.checks.arguments import check_one_of, check_positive_int, described
from gaccum_ms.options.accumulators import Accumulators
from gaccum_ms.splitting.auto_size import AutoSize


def optional(check: Callable[[str, str, Any], None]) -> Callable[[str, str, Any], None]:
    """The check, but for None."""

    def check_unless_none(owner: str, name: str, value: Any) -> None:
        if value is not None:
            check(owner, name, value)

    return check_unless_none


def one_of(*values: str) -> Callable[[str, str, Any], None]:
    """The check that a value is one of these."""

    def check(owner: str, name: str, value: Any) -> None:
        check_one_of(owner, name, value, values)

    return check


def check_micro_batch_size(owner: str, name: str, value: Any) -> None:
    if value is not None and not isinstance(value, AutoSize):
        check_positive_int(owner, name, value)


def check_accumulators(owner: str, name: str, value: Any) -> None:
    if not isinstance(value, Accumulators):
        raise TypeError(
            f"For '{owner}', the argument '{name}' must be gaccum_ms.Accumulators(...), but got {described(value)}."
        )


def check_transforms(owner: str, name: str, value: Any) -> None:
    """Classes are refused, though they are callable."""
    is_sequence = isinstance(value, (tuple, list))
    if not is_sequence or not all(callable(link) and not isinstance(link, type) for link in value):
        raise TypeError(
            f"For '{owner}', the argument '{name}' must be a tuple of Transforms, such as WeightAverage(0.999), and "
            f"functions of the gradients, but got {described(value)}."
        )


def check_count(owner: str, name: str, value: Any) -> None:
    for count in value if isinstance(value, (tuple, list)) else (value,):
        if count is not None and not callable(count):
            raise TypeError(
                f"For '{owner}', the argument '{name}' must be a function or Cell that maps the network's inputs to a "
                f"number of items, or one for each loss, but got {count!r}."
            )


def check_loss_weights(owner: str, name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, (tuple, list)) or any(
        isinstance(weight, bool) or not isinstance(weight, (int, float)) for weight in value
    ):
        raise TypeError(f"For '{owner}', the argument '{name}' must be a sequence of floats, but got {value!r}.")
    if not value or not all(math.isfinite(weight) for weight in value):
        raise ValueError(f"For '{owner}', the argument '{name}' must be finite, one for each loss, but got {value!r}.")
