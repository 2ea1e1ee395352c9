"""What an argument may be, each by itself. Each check raises one clear error, which names the class."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

_MOST_NAMED = 4  # entries of a dict, tuple or list


def check_positive_int(owner: str, name: str, value: Any, least: int = 1) -> None:
    """NumPy's integers are welcome, too."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(
            f"For '{owner}', the argument '{name}' must be an int, but got {value!r} of type '{type(value).__name__}'."
        )
    if value < least:
        raise ValueError(f"For '{owner}', the argument '{name}' must be at least {least}, but got {value}.")


def check_not_negative_int(owner: str, name: str, value: Any) -> None:
    check_positive_int(owner, name, value, least=0)


def check_one_of(owner: str, name: str, value: Any, allowed: tuple) -> None:
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in allowed):
        raise ValueError(f"For '{owner}', the argument '{name}' must be one of {list(allowed)}, but got {value!r}.")


def check_number(owner: str, name: str, value: Any, kinds: str = "a float") -> None:
    """NumPy's numbers are welcome, too."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"For '{owner}', the argument '{name}' must be {kinds}, but got {value!r} of type '{type(value).__name__}'."
        )


def check_finite(owner: str, name: str, value: Any, least: float | None = None, kinds: str = "a float") -> None:
    check_number(owner, name, value, kinds)
    if not math.isfinite(value) or (least is not None and value < least):
        bound = "" if least is None else f" and at least {least}"
        raise ValueError(f"For '{owner}', the argument '{name}' must be finite{bound}, but got {value}.")


def check_positive_finite(owner: str, name: str, value: Any) -> None:
    check_number(owner, name, value)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"For '{owner}', the argument '{name}' must be positive and finite, but got {value}.")


def check_positive(owner: str, name: str, value: Any) -> None:
    """Infinity is welcome, too."""
    check_number(owner, name, value)
    if not value > 0:
        raise ValueError(f"For '{owner}', the argument '{name}' must be positive, but got {value}.")


def check_bool(owner: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"For '{owner}', the argument '{name}' must be a bool, but got {value!r}.")


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


def check_is_optimizer(owner: str, optimizer: Any) -> None:
    """Refuse anything but an optimizer."""
    if not isinstance(optimizer, nn.Cell) or getattr(optimizer, "parameters", None) is None:
        raise TypeError(
            f"For '{owner}', the argument 'optimizer' must be an nn.Optimizer, but got '{type(optimizer).__name__}'."
        )
    complex_weights = [weight.name for weight in optimizer.parameters if weight.dtype in (ms.complex64, ms.complex128)]
    if complex_weights:
        raise TypeError(
            f"For '{owner}', the optimizer's parameters must be real, because accumulators are, but got complex ones: "
            f"{first_of(complex_weights)}. Keep real and imaginary part as two Parameters."
        )


def check_optimizer(owner: str, network: nn.Cell, optimizer: Any) -> None:
    """Refuse anything but an optimizer of this network."""
    check_is_optimizer(owner, optimizer)
    parameters = optimizer.parameters
    own = {id(parameter) for parameter in network.get_parameters()}
    if not any(id(parameter) in own for parameter in parameters):
        raise ValueError(
            f"For '{owner}', the optimizer must have at least one parameter of the "
            f"network, but got an optimizer with {len(parameters)} parameter(s), none of them the network's: nothing "
            f"would be trained. Make the optimizer from this network's 'trainable_params()'."
        )


def first_of(names: Sequence[str], most: int = 3) -> str:
    """The first names of a list, for a message."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def described(value: Any) -> str:
    """A short description of a value for an error, without its contents, which may be megabytes."""
    if isinstance(value, (ms.Tensor, np.ndarray)):
        return f"{type(value).__name__} of shape {tuple(value.shape)} and dtype {value.dtype}"
    if isinstance(value, (dict, tuple, list)):
        named = value.items() if isinstance(value, dict) else enumerate(value)
        entries = ", ".join(f"{name!r}: {described(entry)}" for name, entry in itertools.islice(named, _MOST_NAMED))
        more = ", ..." if len(value) > _MOST_NAMED else ""
        return f"a {type(value).__name__} of {len(value)} ({entries}{more})"
    text = repr(value)
    return f"{text if len(text) < 80 else text[:77] + '...'} of type '{type(value).__name__}'"


def checked_widths(widths: Any, max_tokens: int | None) -> tuple[int, ...]:
    if not isinstance(widths, (tuple, list)) or not all(type(width) is int for width in widths):
        raise TypeError(
            f"For 'MaxTokens', the argument 'widths' must be an int, the largest number of widths, or the widths, a "
            f"list of ints, but got {widths!r}."
        )
    is_sorted = bool(widths) and list(widths) == sorted(set(widths)) and widths[0] >= 1
    if not is_sorted or (max_tokens is not None and widths[-1] > max_tokens):
        bound = "on" if max_tokens is None else f"to max_tokens={max_tokens}"
        raise ValueError(
            f"For 'MaxTokens', the argument 'widths' must be ascending, from 1 {bound}, but got {list(widths)}."
        )
    return tuple(widths)
