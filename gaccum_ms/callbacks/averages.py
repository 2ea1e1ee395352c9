"""In `Model.fit` evaluations see the averages of a WeightAverage in the place of the weights; model_hook.py adds it."""

from __future__ import annotations

import contextlib
from typing import Any

from mindspore.train import Callback, RunContext

from gaccum_ms.callbacks.window_watch import training_step


class AveragesInEvaluation(Callback):
    """Swaps them in as an evaluation begins, and out as MindSpore leaves its callbacks, whatever was raised."""

    def __init__(self) -> None:
        super().__init__()
        self._swapped = contextlib.ExitStack()

    def on_eval_begin(self, run_context: RunContext) -> None:
        step = training_step(run_context)
        if step is not None and step.has_averages:
            self._swapped.enter_context(step.averaged_weights())

    def __exit__(self, *err: Any) -> None:
        self._swapped.close()
