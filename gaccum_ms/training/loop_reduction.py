"""What the gradients of a GradAccumulator are of, means or sums: as given, or as the losses of its functions say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from gaccum_ms.options import compatibility
from gaccum_ms.options.options import Options
from gaccum_ms.options.rules import LOSS, Setup

_NAME = "GradAccumulator"


class LoopReduction:
    """The reduction of one accumulator. It does not refer to the accumulator: see `Scaling` ."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.value = options.reduction  # None: not yet known

    def options_of(self, has_aux: bool) -> Options:
        """The options of a function of the loop."""
        return dataclasses.replace(self._options, reduction=self.value or "mean", aux=has_aux)

    def settle(self) -> None:
        """With the first gradients it is settled: a mean, if no loss has said another."""
        self.value = self.value or "mean"

    def take(self, function: Callable[..., Any], has_aux: bool) -> None:
        """Take what a function's loss says; refuse what contradicts the given one, or that of an earlier function."""
        setup = Setup(dataclasses.replace(self._options, aux=has_aux), function)
        compatibility.check(LOSS, _NAME, setup)
        reduction = setup.known_reduction or "mean"
        if self._options.reduction is None and self.value not in (None, reduction):
            raise ValueError(
                f"For '{_NAME}', all gradients of an accumulator must be of means or all of sums, because it treats "
                f"them alike, but got a function whose loss is a {reduction}, where those before it are of a "
                f"{self.value}. Give each function an accumulator, or their losses one reduction; where the code of a "
                f"function takes the mean or the sum by itself, say which by GradAccumulator(..., reduction=...)."
            )
        self.value = reduction if self._options.reduction is None else self._options.reduction
