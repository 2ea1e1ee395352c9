"""Watches the windows of a training by `ms.Model` , makes their records and calls `on_window_end` .

This is the only place that finds out whether a batch or a flush has ended a window, and whether that made an update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import mindspore as ms
from mindspore.train import Callback, RunContext

from gaccum_ms.record.window_callback import WindowCallback
from gaccum_ms.record.window_notes import WindowNotes, as_float, number, numbers, updates_of


class WindowRecorder(Callback):
    """A callback before all others, which may change what a record tells of the window: the rate, the loss scale.

    Reading waits for the device after each batch, as `LossMonitor` does. So a training without a `WindowCallback` has
    none."""

    def __init__(self, step: Any) -> None:
        super().__init__()
        self._step = step
        self._callbacks: list[WindowCallback] = []
        self._notes = WindowNotes()
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
            self._notes.loss_scale = as_float(outputs[2])  # callbacks may have set it since the step's beginning
        self._loss = as_float(outputs[0] if isinstance(outputs, tuple) else outputs)
        if not self._sinks:
            self._notes.losses.append(self._loss)
            self._notes.counts += self._counts_of_batch(parameters.train_dataset_element)
        if not int(step.window_position.asnumpy()) or updates_of(step) > self._notes.updates:
            self._end()

    @contextlib.contextmanager
    def _around_flush(self) -> Iterator[None]:
        self._begin()
        yield
        # Without batches on any rank, no window has ended. A rank may also take part in other ranks' windows.
        on_other_ranks = self._step.reducer_flag and number(self._step, "window_count")
        if self._batches or on_other_ranks or updates_of(self._step) > self._notes.updates:
            self._end()

    def _begin(self) -> None:
        if not self._notes.losses:
            self._notes = WindowNotes()
        self._batches = int(self._step.window_position.asnumpy())
        self._notes.begin(self._step)

    def _end(self) -> None:
        notes, self._notes = self._notes, WindowNotes()
        notes.end(self._step)
        loss = as_float(self._step.window_loss) if self._step.spans_batches else self._loss
        epoch = self._run_context.original_args().get("cur_epoch_num", 1)
        record = notes.record(self._step, epoch, loss)
        for callback in self._callbacks:
            callback.on_window_end(self._run_context, record)

    def _counts_of_batch(self, batch: tuple[ms.Tensor, ...]) -> list[float]:
        """The last batch's count, or its samples; with several losses, one count for each."""
        step = self._step
        if step.spans_batches:
            return [as_float(step.batch_items)]
        totals = numbers(step, "window_count")
        # The window's count lacks the samples of dropped micro-batches, and includes other ranks'.
        if totals is None or step.window.weighs_samples:
            return [float(batch[0].shape[step.options.first_axis])]
        return totals
