"""Watches the windows of a training by `ms.Model` , makes their records and calls `on_window_end` .

This is the only place that finds out whether a batch or a flush has ended a window, and whether that made an update.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import mindspore as ms
import numpy as np
from mindspore.train import Callback, RunContext

from gaccum_ms.learning_rate import current_learning_rate
from gaccum_ms.record.window_callback import WindowCallback
from gaccum_ms.record.window_record import WindowRecord


class WindowRecorder(Callback):
    """A callback before all others, which may change what a record tells of the window: the rate, the loss scale.

    Reading waits for the device after each batch, as `LossMonitor` does. So a training without a `WindowCallback` has
    none."""

    def __init__(self, step: Any) -> None:
        super().__init__()
        self._step = step
        self._callbacks: list[WindowCallback] = []
        self._losses: list[float] = []
        self._counts: list[float] = []
        self._loss_scale: float | None = None
        self._run_context: Any = None

    @contextlib.contextmanager
    def sees_flushes(self) -> Iterator[None]:
        """Context manager of a training, in which this sees the step's flushes."""
        self._step.around_flush = self._around_flush
        try:
            yield
        finally:
            self._step.around_flush = contextlib.nullcontext
            # It holds this callback. In such a circle the step would live on until Python collects garbage, and
            # MindSpore compiles the graphs of all other Cells anew when a Cell goes.
            self._run_context = None

    def on_train_begin(self, run_context: RunContext) -> None:
        parameters = run_context.original_args()
        self._run_context = run_context
        self._sinks = parameters.dataset_sink_mode
        self._callbacks = [callback for callback in parameters.list_callback if isinstance(callback, WindowCallback)]
        for callback in self._callbacks:
            if self._sinks and callback.every_window:
                raise ValueError(
                    f"For '{type(callback).__name__}', 'dataset_sink_mode' must be False, because data sinking hides "
                    f"windows from callbacks, but got True."
                )

    def on_train_step_begin(self, run_context: RunContext) -> None:
        self._begin()

    def on_train_step_end(self, run_context: RunContext) -> None:
        step, parameters = self._step, run_context.original_args()
        outputs = parameters.net_outputs
        if step.update.scaled:
            self._loss_scale = _float(outputs[2])  # callbacks may have set it since the step's beginning
        self._loss = _float(outputs[0] if isinstance(outputs, tuple) else outputs)
        if not self._sinks:
            self._losses.append(self._loss)
            self._counts += self._counts_of_batch(parameters.train_dataset_element)
        if not int(step.window_position.asnumpy()) or self._updates_now() > self._updates:
            self._end()

    @contextlib.contextmanager
    def _around_flush(self) -> Iterator[None]:
        self._begin()
        yield
        # Without batches on any rank, no window has ended. A rank may also take part in other ranks' windows.
        on_other_ranks = self._step.reducer_flag and self._number("window_count")
        if self._batches or on_other_ranks or self._updates_now() > self._updates:
            self._end()

    def _begin(self) -> None:
        """Note what the end of the window will change."""
        if not self._losses:
            self._began = time.perf_counter()
        self._batches = int(self._step.window_position.asnumpy())
        self._updates = self._updates_now()
        self._skipped = int(self._number("skipped_updates") or 0)
        self._loss_scale = self._number("scale_sense")
        if self._step.update.sens != 1.0:  # this scale is not checked for overflow, and the optimizer removes it
            self._loss_scale = self._step.update.sens

    def _end(self) -> None:
        record = self._record()
        self._losses, self._counts = [], []
        for callback in self._callbacks:
            callback.on_window_end(self._run_context, record)

    def _record(self) -> WindowRecord:
        step = self._step
        update = self._updates_now()
        updated = update > self._updates
        skipped = int(self._number("skipped_updates") or 0)
        totals, terms = self._numbers("window_count"), self._numbers("loss_terms")
        count = totals[0] if totals is not None and terms is None else None
        if totals is None and terms is None and self._counts:
            count = self._counts[-1]
        grad_norm = self._number("grad_norm")
        if grad_norm is None and (updated or skipped > self._skipped):  # else its norm is an older window's
            grad_norm = self._number("judged_norm")
        records_noise = hasattr(step, "noise_sums")
        noise = None
        if records_noise and updated:
            noise = step.window.noise.read(float(step.grad_norm.asnumpy()), step.update.user_scale)
            step.window.noise.estimate.add(noise)
        return WindowRecord(
            update=update,
            updated=updated,
            epoch=self._run_context.original_args().get("cur_epoch_num", 1),
            batches=int(step.window_batches.asnumpy()) if step.spans_batches else 1,
            losses=tuple(self._losses),
            loss=_float(step.window_loss) if step.spans_batches else self._loss,
            counts=tuple(self._counts),
            count=count,
            loss_terms=None if terms is None else tuple(terms),
            dropped_micro_batches=int(self._number("dropped_micro_batches") or 0),
            grad_norm=grad_norm,
            noise_scale=step.window.noise.estimate.noise_scale if records_noise else None,
            loss_scale=self._loss_scale,
            # Read late, because callbacks may have set it since the batch's beginning.
            learning_rate=current_learning_rate(step.optimizer, updates_ago=int(updated)),
            seconds=time.perf_counter() - self._began,
            skipped_updates=skipped,
            noise=noise,
        )

    def _counts_of_batch(self, batch: tuple[ms.Tensor, ...]) -> list[float]:
        """The last batch's count, or its samples; with several losses, one count for each."""
        step = self._step
        if step.spans_batches:
            return [_float(step.batch_items)]
        totals = self._numbers("window_count")
        # The window's count lacks the samples of dropped micro-batches, and includes other ranks'.
        if totals is None or step.window.weighs_samples:
            return [float(batch[0].shape[step.options.first_axis])]
        return totals

    def _updates_now(self) -> int:
        return int(self._step.update_count.asnumpy())

    def _number(self, name: str) -> float | None:
        numbers = self._numbers(name)
        return None if numbers is None else numbers[0]

    def _numbers(self, name: str) -> list[float] | None:
        """The values of one of the step's Parameters; None if the step has none of this name."""
        parameter = getattr(self._step, name, None)
        return None if parameter is None else [_shortest(number) for number in parameter.asnumpy().reshape(-1)]


def _float(tensor: ms.Tensor) -> float:
    return _shortest(tensor.asnumpy().reshape(-1)[0])


def _shortest(number: np.float32) -> float:
    """The shortest number that is this float32: 0.36, and not 0.36000001430511475 as with float()."""
    return float(str(number))
