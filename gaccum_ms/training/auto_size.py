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

from gaccum_ms.accumulation.saturation import clear_flag
from gaccum_ms.backend.graphs import OwnGraph
from gaccum_ms.backend.out_of_memory import is_out_of_memory
from gaccum_ms.backend.parameters import overwrite
from gaccum_ms.backend.snapshot import Snapshot

if TYPE_CHECKING:
    from gaccum_ms.accumulation.update import Update
    from gaccum_ms.cell import GradAccumulationCell
    from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell as Step

_NAME = "GradAccumulationCell"
_search: Any = None  # memory/search.py
_NO_BATCH = 2**31 - 1  # what a rank says that has not had a batch: any size will do


def search_by(search: Any) -> None:
    """Let sizes be found by this module. Its trials train by a step, to which this file belongs."""
    global _search
    _search = search


class AddBatch(OwnGraph):
    """A batch, on this rank alone. Returns what must be known when the window ends, outputs, and the loss scale."""

    def __init__(self, window: nn.Cell, update: Update, jit: bool) -> None:
        super().__init__(jit)
        self.window = window
        self.update = update
        self.spans_batches = window.spans_batches

    def construct(self, *inputs):
        scale = self.update.scale()
        inputs = clear_flag(inputs)
        if self.spans_batches:
            loss, shown = self.window.add_batch(inputs, scale)
            return (loss, *shown, scale)
        sums, unit, shown = self.window.accumulate(inputs, self.window.plan(inputs), scale)
        return (sums, unit, *shown, scale)


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
        self._limit = cell.memory_limit
        self._search_key: tuple | None = None
        self._constants: list[ms.Tensor] | None = None
        self.size: int | None = None  # samples in a micro-batch; None: not found yet

    def __call__(self, inputs: Sequence[ms.Tensor]) -> Any:
        """Train with a batch; returns what the step does."""
        step = self._step
        if self.size is None:
            self._find(inputs)
        *kept, scale = self._add(inputs)
        kept, shown = (kept[:1], kept[1:]) if step.spans_batches else (kept[:2], kept[2:])
        loss, overflow = kept[0], ms.Tensor(False, ms.bool_)
        if not step.spans_batches or step.window.open.is_full:
            try:
                self.agree()
            except RuntimeError:
                self._put_back()  # on the rank on which it does not fit, the batch is not in the window either
                raise
            if step.spans_batches:
                overflow = step.end_window.run_alone(loss)
            else:
                loss, overflow = self._end.run_alone(*kept, scale)
        overwrite(step.batch_count, step.batch_count + 1)
        return step.update.returned(loss, overflow, scale, shown)

    def agree(self) -> None:
        """Before a window's end: go on with the smallest size of all ranks. A collective, where there are several."""
        if self.size is None:  # a flush, on a rank without a batch: others may find their first size meanwhile
            size = _search.agreed_size(_NAME, _NO_BATCH, self._limit)
            if size < _NO_BATCH:
                self._begin(size)
        size = self.size or _NO_BATCH
        smallest = _search.agreed_size(_NAME, size, self._limit)
        if smallest < size:
            self._shrink(smallest, "on another rank")

    # -- the size ------------------------------------------------------------------------------------------------------

    def _find(self, inputs: Sequence[ms.Tensor]) -> None:
        step = self._step
        self._search_key = _search.search_key(self._cell, step.optimizer, inputs, self._limit, self._fails)
        self._begin(_search.found_size(_NAME, self._cell, step.optimizer, inputs, self._limit, self._fails, step))

    def rehearse(self, size: int) -> None:
        """In a trial: train with this size, and fail where it does not fit."""
        self._fails = _never
        self._begin(size)

    def _begin(self, size: int) -> None:
        self._end = EndBatch(self._step.window, self._step.update, bool(self._cell.jit))
        self._set(size)

    def _set(self, size: int) -> None:
        window = self._step.window
        self.size = size
        window.cut_into(size)
        # Of each size a Cell of its own: the old one takes its graphs, and their memory, along.
        self._graph = AddBatch(window, self._step.update, bool(self._cell.jit))
        gc.collect()

    def _shrink(self, size: int, where: str) -> None:
        before = self.size
        self._set(size)
        if self._search_key is not None:
            _search.found_less(self._cell.network, self._search_key, size)
        warnings.warn(
            f"For '{_NAME}', memory ran out {where} with micro_batch_size={before}, found by 'auto': "
            f"training goes on with {size}, on all ranks. No batch is lost.",
            UserWarning,
            stacklevel=6,
        )

    # -- one batch, on this rank alone ---------------------------------------------------------------------------------

    def _add(self, inputs: Sequence[ms.Tensor]) -> tuple[ms.Tensor, ...]:
        """As often as memory runs out, with smaller micro-batches."""
        while True:
            self._note()
            try:
                kept = self._graph.run_alone(*inputs)
                some = kept[0].asnumpy().any()  # waits: it may fail later than it is called
            except Exception as error:
                if not self._fails(error):
                    raise
                failed = type(error).__name__
            else:
                if self._constants is None and some:
                    self._find_constants()
                return kept
            gc.collect()  # what the failed try held, its frames and the error included
            self._put_back()
            size = min(self.size or _NO_BATCH, inputs[0].shape[0])
            if size == 1:
                _search.agreed_size(_NAME, 0, self._limit)  # raises, on all ranks
            self._shrink(-(-size // 2), f"({failed}) for {inputs[0].shape[0]} samples")

    def _note(self) -> None:
        """Keep all that a batch on this rank alone may change."""
        window = self._step.window
        left_out = [*self._step.weights, *(self._constants or ())]
        if not int(self._step.window_position.asnumpy()):  # they are zero
            left_out += window.store.get_parameters()
        self._before = Snapshot(window, leave_out=left_out)

    def _put_back(self) -> None:
        self._step.window.store.reset_eagerly()
        self._before.restore()

    def _find_constants(self) -> None:
        """What is not trained, and what a batch has not changed: frozen Parameters and constants, which may be many."""
        network = {id(one) for one in self._step.network.get_parameters()}
        self._constants = [
            one for one in self._before.unchanged() if id(one) in network or not isinstance(one, ms.Parameter)
        ]


def _never(error: BaseException) -> bool:
    return False
