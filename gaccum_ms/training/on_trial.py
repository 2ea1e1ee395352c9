"""The step of a training, as the search of its size tries it: see memory/trial.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mindspore as ms

if TYPE_CHECKING:
    from gaccum_ms.training.parts import Parts
    from gaccum_ms.training.runner import Runner


class RehearsedStep:
    """Trains as the step does, and updates after each batch."""

    def __init__(self, parts: Parts, runner: Runner) -> None:
        self.window = parts.window
        self._runner = runner
        if parts.end_window is not None:
            self.window.open.set_steps(1)

    def __call__(self, *batch: ms.Tensor) -> Any:
        return self._runner.run(self._runner.prepare(batch))
