"""``micro_batch_size="auto"``: the size of micro-batches is found at the first batch, and halved when memory runs out
(automatic_size.py). Other steps have one graph; this one has two: `AddBatch` , which each rank runs by itself, and the
window's end (update.py), which all ranks run.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mindspore as ms

from gaccum_ms.accumulation.saturation import clear_flag
from gaccum_ms.accumulation.update import OfWindow
from gaccum_ms.training.automatic_size import NO_BATCH, AutomaticSize, RehearsedStep
from gaccum_ms.training.one_graph import even_batch
from gaccum_ms.training.runner import Batch

if TYPE_CHECKING:
    from gaccum_ms.memory.trial import StepOnTrial


class AddBatch(OfWindow):
    """Adds a batch, on this rank alone. Returns the loss, or the sums and their seed per item; the outputs; the loss
    scale."""

    def construct(self, *inputs):
        scale = self.update.scale()
        inputs = clear_flag(inputs)
        if self.window.spans_batches:
            loss, outputs = self.window.add_batch(inputs, scale)
            return (loss, *outputs, scale)
        plan = self.window.plan(inputs)
        seed_per_item = self.window.weighing.seed_per_item(inputs, plan, scale)
        sums, outputs = self.window.accumulate(inputs, plan, scale, seed_per_item)
        return (sums, seed_per_item, *outputs, scale)


class EndBatch(OfWindow):
    """Updates after a batch, if each batch is a window. Returns the loss, and whether the window overflowed."""

    def construct(self, sums, seed_per_item, scale):
        return self.update(*self.window.finish(sums, seed_per_item, scale))


class FoundSize(AutomaticSize):
    """Finds the number of samples in a step's micro-batches, and trains with it."""

    _of = "micro_batch_size"

    def prepare(self, inputs: tuple[Any, ...]) -> Batch:
        return even_batch(self._parts, inputs)

    def run(self, batch: Batch) -> Any:
        parts, inputs = self._parts, batch.inputs
        if self.size is None:
            self._find(inputs)
        *added, scale = self._as_it_fits(lambda: self._add(inputs), inputs[0].shape[self._cell.first_axis])
        if parts.end_window is None:
            sums, seed_per_item, *outputs = added
            self._agree_at_the_end()
            loss, overflow = self._end.run_alone(sums, seed_per_item, scale)
        else:
            loss, *outputs = added
            overflow = ms.Tensor(False, ms.bool_)
            if parts.window.open.is_full:
                self._agree_at_the_end()
                overflow = parts.end_window.run_alone(loss)
        parts.count_batch()
        return parts.update.returned(loss, overflow, scale, outputs)

    def rehearsed(self, size: Any) -> StepOnTrial:
        self._fails = lambda error: False
        self._begin(size)
        return RehearsedStep(self._parts, self)

    def _begin(self, size: int) -> None:
        self._end = EndBatch(self._parts.window, self._parts.update, bool(self._cell.jit))
        self._set(size)

    def _set(self, size: int) -> None:
        window = self._parts.window
        self.size = size
        window.cut_into(size)
        # Each size has its own Cell: the graphs of the old Cell, and their memory, are freed with it.
        self._graph = AddBatch(window, self._parts.update, bool(self._cell.jit))
        gc.collect()

    def _add(self, inputs: Sequence[ms.Tensor]) -> tuple[Any, bool]:
        added = self._graph.run_alone(*inputs)
        return added, bool(added[0].asnumpy().any())  # waits: the error may come after the call

    def _used(self, samples: int) -> int:
        return min(self.size or NO_BATCH, samples)
