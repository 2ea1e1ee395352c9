"""Warns, before training, about learning rates made for batches: the optimizer counts updates."""

from __future__ import annotations

from typing import Any

from gaccum_ms.backend.user_warnings import warn_user
from gaccum_ms.learning_rate import updates_of_rates
from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell

_NEAR = 0.01  # of the batches, or one batch: lists may be a little longer or shorter than the training


def warn_of_rates_for_batches(step: TrainOneStepWithGradAccumulationCell, batches: int, flushes: int) -> None:
    """Warn if the optimizer has as many rates as there are batches: it would use only the first part of them.
    `flushes` : how many windows may end early."""
    steps = int(step.accumulation_steps.asnumpy()) if step.spans_batches else 1
    rates: Any = updates_of_rates(step.optimizer) if steps > 1 else None
    total = int(step.batch_count.asnumpy()) + batches  # including earlier trainings
    if rates is None or abs(rates - total) > max(1, _NEAR * total):
        return
    updates = int(step.update_count.asnumpy()) + batches // steps + flushes
    if rates <= updates:
        return
    warn_user(
        f"For 'GradAccumulationCell', the optimizer's learning rate must be made for updates, of which {batches} "
        f"batches with accumulation_steps={steps} make about {updates}, but got rates for {rates}: the training ends "
        f"before they do, and a decay is {steps} times too slow. Give the optimizer rates for {updates}, or "
        f"gaccum_ms.scale_learning_rate(rates, {steps}, rule='none', per='batch')."
    )
