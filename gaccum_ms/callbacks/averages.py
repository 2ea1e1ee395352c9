"""Evaluations of `Model.fit` use the averages of a WeightAverage; model_hook.py adds this callback."""

from __future__ import annotations

import contextlib
from typing import Any

from mindspore.train import Callback, RunContext

from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell


class AveragesInEvaluation(Callback):
    """Swaps averages in when an evaluation begins, and out when MindSpore leaves its callbacks, also after an error."""

    def __init__(self, step: TrainOneStepWithGradAccumulationCell) -> None:
        super().__init__()
        self._step = step
        self._swapped = contextlib.ExitStack()

    def on_eval_begin(self, run_context: RunContext) -> None:
        if self._step.has_averages:
            self._swapped.enter_context(self._step.averaged_weights())

    def __exit__(self, *err: Any) -> None:
        self._swapped.close()
