"""Checks of a batch: of the inputs that are split, and of what a GradAccumulator is called with."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np

from gaccum_ms.checks.arguments import described

NEEDS_COUNT = (
    "For 'GradAccumulator', with 'min_count', or overflow='drop_micro_batch' and losses that are sums, each call must "
    "have a 'count', the number of items in its batch, by whose total the gradients are divided, but got none. Nothing "
    "was added."
)


def batch_shapes(inputs: tuple[Any, ...]) -> list[tuple[int, ...]]:
    """The shapes of a batch's inputs; a TypeError for an input that cannot be split."""
    for position, value in enumerate(inputs):
        if _is_text(value):
            raise TypeError(
                f"For 'GradAccumulationCell', every input must be a Tensor of numbers, but input {position} got "
                f"{described(value)}. Encode strings as numbers in the data set, or leave their column out."
            )
        if not isinstance(value, ms.Tensor):
            raise TypeError(
                f"For 'GradAccumulationCell', every input must be a Tensor, but input {position} got "
                f"{described(value)}. Give the Tensors of a tuple, list or dict as inputs of their own, and make a "
                f"Tensor of anything else. It has an entry for each sample, or split=EvenSplit(shared=({position},)) "
                f"gives it whole to each micro-batch."
            )
    return [value.shape for value in inputs]


def lacks_rows(shape: tuple[int | None, ...], rows: int | None) -> bool:
    """Whether axis 0 cannot be that of `rows` samples; None, or a length of None or -1: not known yet."""
    return rows is not None and shape[0] not in (rows, None, -1)


def _is_text(value: Any) -> bool:
    """Whether `value` is a string, or an array of strings, as data sets return them."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "SU"
    return isinstance(value, str) or (isinstance(value, ms.Tensor) and value.dtype == ms.string)


# -- of MaxTokens ------------------------------------------------------------------------------------------------------


def whole_numbers(name: str, array: np.ndarray, samples: int | None, largest: int | None = None) -> np.ndarray:
    wanted = f"({samples},)" if samples is not None else "(N,)"
    if array.ndim != 1 or not array.size or (samples is not None and array.size != samples):
        raise ValueError(
            f"For 'MaxTokens', '{name}' must give one length for each sample, of shape {wanted}, but got shape "
            f"{array.shape}."
        )
    if array.dtype.kind not in "iuf" or not np.isfinite(array).all() or (array != np.floor(array)).any():
        raise ValueError(f"For 'MaxTokens', '{name}' must give whole numbers, but got {array.tolist()[:8]}.")
    if array.min() < 0 or (largest is not None and array.max() > largest):
        bound = "" if largest is None else f" and at most {largest}, the batch's width"
        raise ValueError(
            f"For 'MaxTokens', '{name}' must give lengths of at least 0{bound}, but got {int(array.min())} to "
            f"{int(array.max())}."
        )
    return array.astype(np.int64)


def checked_arrays(inputs: Any) -> list[np.ndarray]:
    """The inputs as arrays. The first must have shape (N, W, ...)."""
    for position, value in enumerate(inputs):
        if not isinstance(value, ms.Tensor) or not value.shape:
            raise TypeError(
                f"For 'MaxTokens', every input must be a Tensor whose axis 0 counts samples, but input {position} got "
                f"{described(value)}."
            )
    arrays = [value.asnumpy() for value in inputs]
    if not arrays or arrays[0].ndim < 2:
        raise ValueError(
            f"For 'MaxTokens', the first input must be of shape (N, W, ...), of which axis 1 holds the tokens, but got "
            f"{described(inputs)}."
        )
    if len({array.shape[0] for array in arrays}) > 1:
        raise ValueError(
            f"For 'MaxTokens', axis 0 of all inputs must have the same length, the number of samples, but got shapes "
            f"{[array.shape for array in arrays]}. Make a Tensor with a row for each sample of what all samples share."
        )
    return arrays


# -- of a GradAccumulator ----------------------------------------------------------------------------------------------


def check_gradients(gradients: Any, weights: Sequence[ms.Parameter]) -> None:
    if not isinstance(gradients, (tuple, list)) or not all(isinstance(gradient, ms.Tensor) for gradient in gradients):
        raise TypeError(
            f"For 'GradAccumulator', 'gradients' must be a tuple of Tensors, but got {described(gradients)}."
        )
    shapes, wanted = [gradient.shape for gradient in gradients], [weight.shape for weight in weights]
    if shapes != wanted:
        raise ValueError(
            f"For 'GradAccumulator', 'gradients' must have the number and shapes of the optimizer's parameters, "
            f"{wanted}, but got {shapes}. Differentiate with respect to 'optimizer.parameters'."
        )


def checked_count(count: Any) -> ms.Tensor:
    """The count as a Tensor: each Python number would compile another graph."""
    value: Any = count.asnumpy()[()] if isinstance(count, ms.Tensor) and count.shape == () else count
    if isinstance(value, bool) or not isinstance(value, numbers.Real):  # NumPy's numbers too, but not its bool
        raise TypeError(
            f"For 'GradAccumulator', 'count' must be a number or a Tensor of shape (), but got {described(count)}."
        )
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(
            f"For 'GradAccumulator', 'count' must be finite and not negative, but got {value}. Nothing was added."
        )
    return ms.Tensor(number, ms.float32)


def checked_loss(loss: Any) -> ms.Tensor:
    """A batch's loss as a Tensor, for the same reason."""
    if isinstance(loss, ms.Tensor) and loss.size == 1 and loss.is_floating_point():
        return loss
    if isinstance(loss, bool) or not isinstance(loss, numbers.Real):
        raise TypeError(
            f"For 'GradAccumulator', 'loss' must be a number or a Tensor with one, the batch's loss without loss "
            f"scale, but got {described(loss)}."
        )
    return ms.Tensor(float(loss), ms.float32)


def check_rule(rule: str, rule_of_window: str, batches: int, count: Any) -> None:
    """Refuse a batch that weighs by another rule than the `batches` of its window."""
    if batches and rule != rule_of_window:
        raise ValueError(
            "For 'GradAccumulator', 'count' must be given with every batch of a window or with none, and each batch's "
            f"gradients be of 'value_and_grad' or none's, but got count={count} and gradients that weigh by "
            f"{rule} after {batches} batch(es) that weigh by {rule_of_window}. Nothing was added."
        )
