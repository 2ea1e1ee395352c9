"""What Python notes of a window while it is open, and reads of the step or accumulator when it has ended."""

from __future__ import annotations

import time
from typing import Any

import mindspore as ms
import numpy as np

from gaccum_ms.learning_rate import current_learning_rate
from gaccum_ms.record.run_record import RULES
from gaccum_ms.record.window_record import WindowRecord

# By the rule of weighting.
_COUNTED = {"samples": "samples", "sums": "samples", "counts": "items", "batches": "batches"}


class WindowNotes:
    """The notes of one window, from now on. `step` , in the methods: a training step or a GradAccumulator."""

    def __init__(self) -> None:
        self.losses: list[Any] = []  # each batch's, a Tensor or a float
        self.counts: list[Any] = []
        self._began = time.perf_counter()
        self.updates = self._skipped = self.update = 0
        self.loss_scale: float | None = None
        self.seconds = 0.0
        self.counted = ""
        self.rate: float | None = None

    def begin(self, step: Any) -> None:
        """Before each batch or flush: note what the end of the window will change."""
        self.updates = updates_of(step)
        self._skipped = int(number(step, "skipped_updates") or 0)
        self.loss_scale = number(step.update, "scale_sense")
        if step.update.sens != 1.0:  # this scale is not checked for overflow, and the optimizer removes it
            self.loss_scale = step.update.sens

    def end(self, step: Any) -> None:
        """When the window has ended."""
        self.seconds = time.perf_counter() - self._began
        self.update = updates_of(step)
        self.counted = _COUNTED[RULES[int(step.run_record.window_rule.asnumpy())]]

    def record(self, step: Any, epoch: int | None, loss: float) -> WindowRecord:
        """The record, after `end` and before a later window ends. `loss` : the window's mean."""
        updated = self.update > self.updates
        skipped = int(number(step, "skipped_updates") or 0)
        totals, terms = numbers(step, "window_count"), numbers(step, "loss_terms")
        counts = tuple(map(as_float, self.counts))
        count = totals[0] if totals is not None and terms is None else None
        if totals is None and terms is None and counts:
            count = counts[-1]
        grad_norm = number(step, "grad_norm")
        if grad_norm is None and (updated or skipped > self._skipped):  # else its norm is an older window's
            grad_norm = number(step, "judged_norm")
        records_noise = hasattr(step, "noise_sums")
        noise = None
        if records_noise and updated:
            noise = step.window.ledger.noise.read(float(step.grad_norm.asnumpy()), step.update.user_scale)
            step.window.ledger.noise.estimate.add(noise)
        if self.rate is None:  # read late, because callbacks may have set it since the batch's beginning
            self.rate = current_learning_rate(step.optimizer, updates_ago=int(updated))
        return WindowRecord(
            update=self.update,
            updated=updated,
            epoch=epoch,
            batches=int(step.window_batches.asnumpy()) if step.spans_batches else 1,
            losses=tuple(map(as_float, self.losses)),
            loss=loss,
            counts=counts,
            count=count,
            loss_terms=None if terms is None else tuple(terms),
            dropped_micro_batches=int(number(step, "dropped_micro_batches") or 0),
            grad_norm=grad_norm,
            noise_scale=step.window.ledger.noise.estimate.noise_scale if records_noise else None,
            loss_scale=self.loss_scale,
            learning_rate=self.rate,
            seconds=self.seconds,
            counted=self.counted,
            skipped_updates=skipped,
            noise=noise,
        )


def updates_of(step: Any) -> int:
    return int(step.update_count.asnumpy())


def number(step: Any, name: str) -> float | None:
    """The value of one of the step's Parameters; None if the step has none of this name."""
    values = numbers(step, name)
    return None if values is None else values[0]


def numbers(step: Any, name: str) -> list[float] | None:
    parameter = getattr(step, name, None)
    return None if parameter is None else [_shortest(value) for value in parameter.asnumpy().reshape(-1)]


def as_float(value: ms.Tensor | float) -> float:
    return _shortest(value.asnumpy().reshape(-1)[0]) if isinstance(value, ms.Tensor) else float(value)


def _shortest(value: np.float32) -> float:
    """The shortest number that is this float32: 0.36, and not 0.36000001430511475 as with float()."""
    return float(str(value))
