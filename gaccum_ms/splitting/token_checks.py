"""Checks the arguments and inputs of `MaxTokens` , before anything is split."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np

from gaccum_ms.checks.arguments import described

NAME = "MaxTokens"


def checked_widths(widths: Any, max_tokens: int | None) -> tuple[int, ...]:
    if not isinstance(widths, (tuple, list)) or not all(type(width) is int for width in widths):
        raise TypeError(
            f"For '{NAME}', the argument 'widths' must be an int, the largest number of widths, or the widths, a "
            f"list of ints, but got {widths!r}."
        )
    is_sorted = bool(widths) and list(widths) == sorted(set(widths)) and widths[0] >= 1
    if not is_sorted or (max_tokens is not None and widths[-1] > max_tokens):
        bound = "on" if max_tokens is None else f"to max_tokens={max_tokens}"
        raise ValueError(
            f"For '{NAME}', the argument 'widths' must be ascending, from 1 {bound}, but got {list(widths)}."
        )
    return tuple(widths)


def whole_numbers(name: str, array: np.ndarray, samples: int | None, largest: int | None = None) -> np.ndarray:
    wanted = f"({samples},)" if samples is not None else "(N,)"
    if array.ndim != 1 or not array.size or (samples is not None and array.size != samples):
        raise ValueError(
            f"For '{NAME}', '{name}' must give one length for each sample, of shape {wanted}, but got shape "
            f"{array.shape}."
        )
    if array.dtype.kind not in "iuf" or not np.isfinite(array).all() or (array != np.floor(array)).any():
        raise ValueError(f"For '{NAME}', '{name}' must give whole numbers, but got {array.tolist()[:8]}.")
    if array.min() < 0 or (largest is not None and array.max() > largest):
        bound = "" if largest is None else f" and at most {largest}, the batch's width"
        raise ValueError(
            f"For '{NAME}', '{name}' must give lengths of at least 0{bound}, but got {int(array.min())} to "
            f"{int(array.max())}."
        )
    return array.astype(np.int64)


def checked_arrays(inputs: Any) -> list[np.ndarray]:
    """The inputs as arrays. The first must have shape (N, W, ...)."""
    for position, value in enumerate(inputs):
        if not isinstance(value, ms.Tensor) or not value.shape:
            raise TypeError(
                f"For '{NAME}', every input must be a Tensor whose axis 0 counts samples, but input {position} got "
                f"{described(value)}."
            )
    arrays = [value.asnumpy() for value in inputs]
    if not arrays or arrays[0].ndim < 2:
        raise ValueError(
            f"For '{NAME}', the first input must be of shape (N, W, ...), of which axis 1 holds the tokens, but got "
            f"{described(inputs)}."
        )
    if len({array.shape[0] for array in arrays}) > 1:
        raise ValueError(
            f"For '{NAME}', axis 0 of all inputs must have the same length, the number of samples, but got shapes "
            f"{[array.shape for array in arrays]}. Make a Tensor with a row for each sample of what all samples share."
        )
    return arrays
