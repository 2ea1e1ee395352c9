"""A step of two graphs, for a size of micro-batches that may change: `AddBatch` , which each rank runs by itself, and
the window's end, which all ranks run: `EndBatch` , or update.py's if windows have several batches.
"""

from __future__ import annotations

import gc
from typing import Any

import mindspore as ms

from gaccum_ms.accumulation.saturation import clear_flag
from gaccum_ms.accumulation.update import OfWindow
from gaccum_ms.training.components import Components
from gaccum_ms.training.one_graph import even_batch
from gaccum_ms.training.runner import Batch, Runner


class AddBatch(OfWindow):
    """Adds a batch, on this rank alone. Returns the loss, or the sums and their unit; the outputs; the loss
    scale."""

    def construct(self, *inputs):
        scale = self.update.scale()
        inputs = clear_flag(inputs)
        if self.window.spans_batches:
            loss, outputs = self.window.add_batch(inputs, scale)
            return (loss, *outputs, scale)
        plan = self.window.plan(inputs)
        unit = self.window.ledger.begin(scale, self.window.measure.total(inputs, plan))
        sums, outputs = self.window.add_up(inputs, plan, scale, unit)
        return (sums, unit, *outputs, scale)


class EndBatch(OfWindow):
    """Updates after a batch, if each batch is a window. Returns the loss, and whether the window overflowed."""

    def construct(self, sums, unit, scale):
        gradients = self.window.store.read(sums)
        return self.update(*self.window.ledger.close(gradients, sums, unit, scale))


class TwoGraphs(Runner):
    """Adds a batch, and then ends its window."""

    size_is = "micro_batch_size"
    least = 1

    def __init__(self, components: Components) -> None:
        self._components = components
        self._jit = bool(components.options.jit)
        self._end = EndBatch(components.window, components.update, self._jit)

    @property
    def size(self) -> int | None:
        """Samples in a micro-batch."""
        return self._components.window.micro_batch_size

    def cut_into(self, size: int) -> None:
        """Train with this size from now on. Each size has its own Cell: the graphs of the old Cell, and their memory,
        are freed with it."""
        self._components.window.micro_batch_size = size
        self._add = AddBatch(self._components.window, self._components.update, self._jit)
        gc.collect()

    def prepare(self, inputs: tuple[Any, ...]) -> Batch:
        return even_batch(self._components, inputs)

    def run(self, batch: Batch) -> Any:
        return self.end(self.add(batch))

    def add(self, batch: Batch) -> tuple[Any, ...]:
        """Add a batch to the window, on this rank alone. The first of what it returns is zero if nothing was added."""
        return self._add.run_alone(*batch.inputs)

    def end(self, added: tuple[Any, ...]) -> Any:
        """Finish a batch; if its window ends, update on all ranks. Returns what the step returns."""
        components = self._components
        if components.end_window is None:
            sums, unit, *outputs, scale = added
            loss, overflow = self._end.run_alone(sums, unit, scale)
        else:
            loss, *outputs, scale = added
            is_full = components.window.open.is_full
            overflow = components.end_window.run_alone(loss) if is_full else ms.Tensor(False, ms.bool_)
        components.count_batch()
        return components.update.returned(loss, overflow, scale, outputs)
