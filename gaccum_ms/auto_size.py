"""``micro_batch_size="auto"``: the size of micro-batches is found at the first batch, and halved when memory runs out.

Where other steps have one graph, this one has two:

    each rank by itself:        split; for each micro-batch: forward, backward, add
                                out of memory? put all back, halve, and again
    a window's last batch?      all ranks: from the next batch on, the smallest of their sizes
    all ranks:                  reduce, divide, clip, update, clear                             (update.py)

The first changes neither weights nor optimizer, so that putting back what it has changed needs no copy of these; and a
rank can try again alone, while the others wait for it where the sizes are exchanged: what they have added up stays
right, since the sizes of micro-batches do not change what they add up to.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mindspore as ms
from mindspore import nn

from gaccum_ms.accumulator import overwrite
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.find_size import agreed_size, find_micro_batch_size
from gaccum_ms.out_of_memory import is_out_of_memory
from gaccum_ms.own_graph import OwnGraph, compiling_alone
from gaccum_ms.snapshot import Snapshot
from gaccum_ms.update import Update

if TYPE_CHECKING:
    from gaccum_ms.train_step import TrainOneStepWithGradAccumulationCell as Step

_NAME = "GradAccumulationCell"
_NO_BATCH = 2**31 - 1  # what a rank says that has not had a batch: any size will do


class AddBatch(OwnGraph):
    """A batch, on this rank alone. Returns what must be known when the window ends, the loss scale last."""

    def __init__(self, window: nn.Cell, update: Update, jit: bool) -> None:
        super().__init__(jit)
        self.window = window
        self.update = update
        self.spans_batches = window.spans_batches

    def construct(self, *inputs):
        scale = self.update.scale()
        if self.spans_batches:
            return self.window.add_batch(inputs, scale), scale
        return self.window.gather(inputs, scale)


class EndBatch(OwnGraph):
    """The rest, where each batch is a window. Returns the loss, and whether the window overflowed."""

    def __init__(self, window: nn.Cell, update: Update, jit: bool) -> None:
        super().__init__(jit)
        self.window = window
        self.update = update

    def construct(self, sums, unit, scale):
        return self.update(*self.window.finish(sums, unit, scale))


class AutoSize:
    """The size of a step's micro-batches, and how it trains by it.

    Args:
        step (TrainOneStepWithGradAccumulationCell): The step.
        cell (GradAccumulationCell): Its options.
    """

    def __init__(self, step: Step, cell: GradAccumulationCell) -> None:
        self._step = step
        self._cell = cell
        self._fails = cell.is_out_of_memory or is_out_of_memory
        self.size: int | None = None  # samples in a micro-batch; None: there was no batch yet

    def __call__(self, inputs: Sequence[ms.Tensor]) -> Any:
        """Train with a batch; returns what the step does."""
        step = self._step
        with compiling_alone():
            if self.size is None:
                found = self._cell, step.optimizer, inputs, self._cell.memory_limit, self._fails
                self._begin(find_micro_batch_size(*found))
            *kept, scale = self._add(inputs)
            loss, overflow = kept[0], ms.Tensor(False, ms.bool_)
            if not step.spans_batches:
                self.agree()
                loss, overflow = self._end.run_alone(*kept, scale)
            elif step.window.open.is_full:
                self.agree()
                overflow = step.end_window.run_alone(loss)
        overwrite(step.batch_count, step.batch_count + 1)
        return (loss, overflow, scale) if step.update.scaled else loss

    def agree(self) -> None:
        """Before a window's end: go on with the smallest size of all ranks. A collective, where there are several."""
        if self.size is None:  # a flush, on a rank without a batch, while others find their first size
            self._begin(agreed_size(_NAME, _NO_BATCH, self._cell.memory_limit))
        assert self.size is not None
        smallest = agreed_size(_NAME, self.size, self._cell.memory_limit)
        if smallest < self.size:
            self._shrink(smallest, "on another rank")

    def _begin(self, size: int) -> None:
        step = self._step
        self._end = EndBatch(step.window, step.update, bool(self._cell.jit))
        self._set(size)

    def _set(self, size: int) -> None:
        step = self._step
        self.size = step.window.micro_batch_size = size
        # Of each size a Cell of its own: the old one takes its graphs, and their memory, along.
        self._graph = AddBatch(step.window, step.update, bool(self._cell.jit))
        gc.collect()

    def _add(self, inputs: Sequence[ms.Tensor]) -> tuple[ms.Tensor, ...]:
        """A batch, on this rank alone: as often as memory runs out, with smaller micro-batches."""
        while True:
            before = self._snapshot()
            try:
                kept = self._graph.run_alone(*inputs)
                kept[0].asnumpy()  # waits: it may fail later than it is called
                return kept
            except Exception as error:
                if not self._fails(error):
                    raise
                before()
                self._halve(inputs[0].shape[0], error)

    def _snapshot(self) -> Any:
        """What puts back all that a batch on this rank alone changes."""
        window = self._step.window
        left_out = list(self._step.weights)
        accumulators = window.accumulators
        if not int(self._step.window_position.asnumpy()):  # they are zero
            left_out += accumulators.get_parameters()
        before = Snapshot(window, leave_out=left_out)

        def restore() -> None:
            accumulators.forget()
            before.restore()

        return restore

    def _halve(self, samples: int, error: Exception) -> None:
        size = min(self.size or samples, samples)
        if size == 1:
            agreed_size(_NAME, 0, self._cell.memory_limit)  # raises, on all ranks
        self._shrink(-(-size // 2), f"with {type(error).__name__}")

    def _shrink(self, size: int, where: str) -> None:
        warnings.warn(
            f"For '{_NAME}', memory ran out {where} with micro_batch_size={self.size}, found by 'auto': "
            f"training goes on with {size}, on all ranks. No batch is lost.",
            UserWarning,
            stacklevel=7,
        )
        self._set(size)
