"""Gradients that know how many samples their batch has, so that a GradAccumulator weighs batches by their samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms

from gaccum_ms.checks.arguments import described


class GradientsOfBatch(tuple):
    """The gradients of a batch."""

    samples: int


def value_and_grad(function: Callable[..., Any], weights: ms.ParameterTuple, has_aux: bool) -> Callable[..., Any]:
    """As `mindspore.value_and_grad` , with such gradients; see `GradAccumulator.value_and_grad` ."""
    value_and_gradients = ms.value_and_grad(function, None, weights, has_aux)

    def of_batch(*inputs: Any) -> tuple[Any, GradientsOfBatch]:
        first = inputs[0] if inputs else None
        if not isinstance(first, ms.Tensor) or not first.shape:
            raise TypeError(
                f"For 'GradAccumulator', the first input of a function of 'value_and_grad' must be a Tensor whose "
                f"first axis is that of samples, but got {described(first)}. Use mindspore.value_and_grad, and give "
                f"the accumulator a 'count'."
            )
        value, gradients = value_and_gradients(*inputs)
        gradients = GradientsOfBatch(gradients)
        gradients.samples = first.shape[0]
        return value, gradients

    return of_batch
