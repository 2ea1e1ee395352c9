"""How many samples a loop's gradients are of, so that a GradAccumulator weighs batches by their samples.

The gradients of `value_and_grad` know it themselves. Where a loop gives others, computed from these, the calls since
the accumulator's last call tell it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms

from gaccum_ms.checks.arguments import described
from gaccum_ms.training.advice import LossAdvice


class GradientsOfBatch(tuple):
    """The gradients of a batch."""

    samples: int


class CallsOfFunctions:
    """The calls of an accumulator's functions since its last call, flush or error."""

    def __init__(self) -> None:
        self._samples: dict[int, None] = {}  # as a set in order
        self._batches: dict[LossAdvice, Sequence[Any]] = {}  # of each function the last

    def note(self, samples: int, advice: LossAdvice, batch: Sequence[Any]) -> None:
        """Note a call."""
        self._samples[samples] = None
        self._batches[advice] = batch

    def take(self) -> CallsOfFunctions:
        """The calls so far, which are forgotten here."""
        taken = CallsOfFunctions()
        taken._samples, self._samples = self._samples, {}
        taken._batches, self._batches = self._batches, {}
        return taken

    def samples_of(self, gradients: Sequence[ms.Tensor]) -> int | None:
        """The number of samples that gradients are of; None if no function has computed any."""
        if isinstance(gradients, GradientsOfBatch):
            return gradients.samples
        if len(self._samples) > 1:
            raise ValueError(
                f"For 'GradAccumulator', 'count' must be given with gradients that are computed from those of batches "
                f"of several sizes, but got none after functions of 'value_and_grad' with "
                f"{' and '.join(map(str, self._samples))} samples. Give the number of samples that these gradients "
                f"are a mean over. Nothing was added."
            )
        return next(iter(self._samples), None)

    def look(self, gradients: Sequence[ms.Tensor], count: ms.Tensor | None) -> None:
        """Warn of losses that must be counted, and are not, or by another count. `count` : that of the gradients."""
        is_of_batch = isinstance(gradients, GradientsOfBatch) and len(self._batches) == 1
        for advice, batch in self._batches.items():
            if count is None or is_of_batch:
                advice.look_in_loop(batch, count)
            else:
                advice.proof.skip("the gradients that are counted are computed from those of a function")


def value_and_grad(
    function: Callable[..., Any],
    weights: ms.ParameterTuple,
    has_aux: bool,
    calls: CallsOfFunctions,
    advice: LossAdvice,
) -> Callable[..., Any]:
    """As `mindspore.value_and_grad` , with such gradients; see `GradAccumulator.value_and_grad` ."""
    value_and_gradients = ms.value_and_grad(function, None, weights, has_aux)

    def of_batch(*inputs: Any) -> tuple[Any, GradientsOfBatch]:
        first = inputs[0] if inputs else None
        try:
            if not isinstance(first, ms.Tensor) or not first.shape:
                raise TypeError(
                    f"For 'GradAccumulator', the first input of a function of 'value_and_grad' must be a Tensor whose "
                    f"first axis is that of samples, but got {described(first)}. Use mindspore.value_and_grad, and "
                    f"give the accumulator a 'count'."
                )
            value, gradients = value_and_gradients(*inputs)
        except BaseException:
            calls.take()
            raise
        gradients = GradientsOfBatch(gradients)
        gradients.samples = first.shape[0]
        calls.note(first.shape[0], advice, inputs)
        return value, gradients

    return of_batch
