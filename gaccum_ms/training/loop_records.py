"""The records of a GradAccumulator's windows: what it notes at each call, until `record` asks."""

from __future__ import annotations

import math
from typing import Any

from mindspore.experimental.optim import Optimizer as ExperimentalOptimizer  # the base of mindspore.mint.optim's too

from gaccum_ms.backend.newer_optimizers import without_shards
from gaccum_ms.learning_rate import current_learning_rate
from gaccum_ms.record.run_record import RULES
from gaccum_ms.record.window_notes import WindowNotes, as_float, updates_of
from gaccum_ms.record.window_record import WindowRecord


class LoopRecords:
    """The notes of the open window, and of the last that has ended. It does not refer to the accumulator, which its
    methods take: see `Scaling` ."""

    def __init__(self) -> None:
        self._notes = WindowNotes()
        self._ended: WindowNotes | None = None
        self._loss_in_graph = False

    def note_loss(self) -> None:
        """Note that a function under `mindspore.jit` gives losses, which Python does not see."""
        self._loss_in_graph = True

    def check_loss(self, loss: Any) -> None:
        """Refuse a loss after batches without, or none after batches with one: the window would have no mean."""
        notes = self._notes
        if notes.counts and bool(notes.losses) != (loss is not None):
            raise ValueError(
                f"For 'GradAccumulator', 'loss' must be given with every batch of a window or with none, but got "
                f"{'none' if loss is None else 'one'} after {len(notes.counts)} batch(es) with "
                f"{len(notes.losses)} loss(es). Nothing was added."
            )

    def begin(self, accumulator: Any) -> None:
        """Before a batch or a flush."""
        if self._notes.counts and not accumulator.window.batches:  # the window was dropped
            self.clear(accumulator)
        self._notes.begin(accumulator)

    def add(self, loss: Any, count: Any) -> None:
        """After a batch."""
        self._notes.counts.append(count)
        if loss is not None:
            self._notes.losses.append(loss)

    def end(self, accumulator: Any) -> None:
        """After the batch or flush that has ended the window, and before a scheduler writes the rate."""
        self._notes.end(accumulator)
        if RULES[int(accumulator.run_record.window_rule.asnumpy())] == "sums":  # without counts
            self._notes.counted = "batches"
        if isinstance(without_shards(accumulator.optimizer), ExperimentalOptimizer):
            updated = self._notes.update > self._notes.updates
            self._notes.rate = current_learning_rate(accumulator.optimizer, updates_ago=int(updated))
        self._ended, self._notes = self._notes, WindowNotes()

    def clear(self, accumulator: Any) -> None:
        """Forget the open window."""
        self._notes = WindowNotes()
        self._notes.updates = updates_of(accumulator)

    def begin_anew(self, accumulator: Any) -> None:
        """Forget all windows: a checkpoint is loaded."""
        self._ended = None
        self.clear(accumulator)

    def record(self, accumulator: Any, epoch: int | None) -> WindowRecord:
        """The record of the last window that has ended."""
        ended, updates = self._ended, updates_of(accumulator)
        if ended is not None and updates < ended.update and not self._notes.counts:
            # MindSpore has loaded an earlier checkpoint, and a graph may have called the accumulator since.
            ended, self._notes.updates = None, 0
        if updates > (self._notes.updates if ended is None else ended.update):  # a graph has called the accumulator
            self._notes.begin(accumulator)
            self._notes.updates = updates - 1
            self.end(accumulator)
            ended = self._ended
        if ended is None:
            raise RuntimeError(
                "For 'GradAccumulator', 'record' needs a window that has ended, but got none. Call it after a call of "
                "the accumulator, or of 'flush', that has ended one."
            )
        has_loss = ended.losses or self._loss_in_graph
        return ended.record(accumulator, epoch, as_float(accumulator.window_loss) if has_loss else math.nan)
