"""A size of micro-batches that fits into memory: found at the first batch, and halved when memory runs out in training.

    each rank by itself:        add the batch; weights and optimizer state do not change
                                out of memory? restore everything, halve the size, and try again
    a window's last batch?      all ranks: from the next batch on, use the smallest size of all ranks

Restoring what a batch has changed needs no copy of weights and optimizer state. A rank can try again alone, while the
others wait for it where the sizes are exchanged. Their sums stay right, because sums do not depend on the size of
micro-batches.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mindspore as ms

from gaccum_ms.backend.out_of_memory import is_out_of_memory
from gaccum_ms.backend.snapshot import Snapshot
from gaccum_ms.backend.user_warnings import warn_user
from gaccum_ms.memory import search
from gaccum_ms.training.runner import Runner

if TYPE_CHECKING:
    from gaccum_ms.cell import GradAccumulationCell
    from gaccum_ms.memory.trial import MakeStep, StepOnTrial
    from gaccum_ms.training.parts import Parts

_NAME = "GradAccumulationCell"
NO_BATCH = 2**31 - 1  # the size of a rank that has not had a batch: any size fits


class AutomaticSize(Runner):
    """Finds and halves the size of a step's micro-batches. A subclass defines the unit of the size, and trains with
    it."""

    _of: str  # the option that has the size as its value
    _least = 1  # the smallest possible size

    def __init__(self, parts: Parts, cell: GradAccumulationCell, make_step: MakeStep) -> None:
        self._parts = parts
        self._cell = cell
        self._make_step = make_step
        self._fails = cell.auto.is_out_of_memory or is_out_of_memory
        self._limit = cell.auto.memory_limit
        self._search_key: tuple | None = None
        self._constants: list[ms.Tensor] | None = None
        self.size: int | None = None  # None: not found yet

    def agree(self) -> None:
        """Before a window's end: go on with the smallest size of all ranks. With several ranks, a collective."""
        if self.size is None:  # a flush, on a rank without a batch: others may be finding their first size
            size = search.agreed_size(_NAME, NO_BATCH, self._limit)
            if size < NO_BATCH:
                self._begin(size)
        size = self.size or NO_BATCH
        smallest = max(search.agreed_size(_NAME, size, self._limit), self._least)
        if smallest < size:
            self._shrink(smallest, "on another rank")

    def get_parameters(self) -> list[ms.Parameter]:
        """What training writes."""
        parts = self._parts
        cells = parts.network, parts.window, parts.update
        return [parts.batch_count, parts.window_position, *(each for cell in cells for each in cell.get_parameters())]

    def rehearsed(self, size: Any) -> StepOnTrial:
        """In a trial: the step of this training, with a size. It raises the error if that does not fit."""
        raise NotImplementedError

    # -- the size ------------------------------------------------------------------------------------------------------

    def _begin(self, size: int) -> None:
        """Start with the first size."""
        self._set(size)

    def _set(self, size: int) -> None:
        """Train with this size, in new graphs."""
        raise NotImplementedError

    def _find(self, inputs: Sequence[ms.Tensor]) -> None:
        what = self._cell, self._parts.update.optimizer, inputs, self._limit, self._fails
        size, self._search_key = search.found_size(_NAME, *what, self._make_step, self)
        self._begin(size)

    def _shrink(self, size: int, where: str) -> None:
        before = self.size
        self._set(size)
        if self._search_key is not None:
            search.found_less(self._cell.network, self._search_key, size)
        warn_user(
            f"For '{_NAME}', memory ran out {where} with {self._of}={before}, found by 'auto': "
            f"training goes on with {size}, on all ranks. No batch is lost."
        )

    # -- one batch, on this rank alone ---------------------------------------------------------------------------------

    def _as_it_fits(self, add: Callable[[], tuple[Any, bool]], samples: int) -> Any:
        """Add a batch to the window. Whenever memory runs out, try again with smaller micro-batches. `add` waits for
        the result, and returns it, and whether the batch added anything."""
        while True:
            self._note()
            try:
                added, some = add()
            except Exception as error:
                if not self._fails(error):
                    raise
                failed = type(error).__name__
            else:
                if self._constants is None and some:
                    self._find_constants()
                return added
            gc.collect()  # frees what the failed try held, its frames and the error included
            self._put_back()
            size = self._used(samples)
            if size <= self._least:
                self._set(self.size or size)  # a graph that has failed does not run again
                search.agreed_size(_NAME, 0, self._limit)  # raises, on all ranks
            self._shrink(max(-(-size // 2), self._least), f"({failed}) for {samples} samples")

    def _used(self, samples: int) -> int:
        """The size that a batch of this many samples was trained with."""
        return self.size or NO_BATCH

    def _agree_at_the_end(self) -> None:
        try:
            self.agree()
        except RuntimeError:
            self._put_back()  # as on the rank on which the batch does not fit: it is in no window
            raise

    def _note(self) -> None:
        """Keep a copy of everything that a batch on this rank alone may change."""
        window = self._parts.window
        left_out = [*self._parts.weights, *(self._constants or ())]
        if self._parts.is_between_windows:  # they are zero
            left_out += window.store.get_parameters()
        self._before = Snapshot(window, leave_out=left_out)

    def _put_back(self) -> None:
        self._parts.window.store.reset_eagerly()
        self._before.restore()

    def _find_constants(self) -> None:
        """Find what a batch has not changed: frozen Parameters and constants, which may be many. They need no copy."""
        network = {id(tensor) for tensor in self._parts.network.get_parameters()}
        self._constants = [
            tensor
            for tensor in self._before.unchanged()
            if id(tensor) in network or not isinstance(tensor, ms.Parameter)
        ]


class RehearsedStep:
    """The step of a training, as the search of its size tries it (memory/trial.py): it updates after each batch."""

    def __init__(self, parts: Parts, runner: Runner) -> None:
        self.window = parts.window
        self._runner = runner
        if parts.spans_batches:
            self.window.open.set_steps(1)

    def __call__(self, *batch: ms.Tensor) -> Any:
        return self._runner.run(self._runner.prepare(batch))
