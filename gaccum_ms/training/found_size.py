"""A size of micro-batches that fits into memory: found at the first batch, and halved when memory runs out in training.
This is a runner around another one, which trains with the size:

    each rank by itself:        add the batch; weights and optimizer state do not change
                                out of memory? restore everything, halve the size, and try again
    a window's last batch?      all ranks: from the next batch on, use the smallest size of all ranks

Restoring what a batch has changed needs no copy of weights and optimizer state. A rank can try again alone, while the
others wait for it where the sizes are exchanged. Their sums stay right, because sums do not depend on the size of
micro-batches.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mindspore as ms

from gaccum_ms.backend.out_of_memory import memory_test
from gaccum_ms.backend.snapshot import Snapshot
from gaccum_ms.backend.user_warnings import warn_user
from gaccum_ms.memory import search
from gaccum_ms.memory.trial import MakeStep, Trials
from gaccum_ms.training.runner import Batch, Runner

if TYPE_CHECKING:
    from gaccum_ms.cell import GradAccumulationCell
    from gaccum_ms.training.components import Components
    from gaccum_ms.training.python_split import PythonSplit
    from gaccum_ms.training.two_graphs import TwoGraphs

_NAME = "GradAccumulationCell"
_NO_BATCH = 2**31 - 1  # the size of a rank that has not had a batch: any size fits


class FoundSize(Runner):
    """Finds and halves the size with which another runner trains."""

    def __init__(
        self, components: Components, cell: GradAccumulationCell, runner: TwoGraphs | PythonSplit, make_step: MakeStep
    ) -> None:
        self._components = components
        self._cell = cell
        self.runner = runner
        self.split = runner.split
        self._make_step = make_step
        self._fails = memory_test(cell.auto.is_out_of_memory)
        self._limit = cell.auto.memory_limit
        self._constants: list[ms.Tensor] | None = None

    def prepare(self, inputs: tuple[Any, ...]) -> Batch:
        if self.split is not None:  # it needs the size
            self._components.check_inputs(len(inputs))
            self._find(inputs)
        return self.runner.prepare(inputs)

    def _find(self, inputs: Sequence[ms.Tensor]) -> None:
        """At the first batch. With several ranks, a collective."""
        if self.runner.size is None:
            optimizer = self._components.update.optimizer
            trials = Trials(_NAME, self._cell, optimizer, inputs, self._make_step, self._limit)
            self.runner.cut_into(search.found_size(trials, self._fails))

    def run(self, batch: Batch) -> Any:
        self._find(batch.inputs)
        added = self._as_it_fits(batch)
        if self._components.end_window is None or self._components.window.open.is_full:
            try:
                self.agree()
            except RuntimeError:
                self._put_back()  # as on the rank on which the batch does not fit: it is in no window
                raise
        return self.runner.end(added)

    def agree(self) -> None:
        """Before a window's end: go on with the smallest size of all ranks. With several ranks, a collective."""
        if self.runner.size is None:  # a flush, on a rank without a batch: others may be finding their first size
            size = search.agreed_size(_NAME, _NO_BATCH, self._limit)
            if size < _NO_BATCH:
                self.runner.cut_into(size)
        size = self.runner.size or _NO_BATCH
        smallest = max(search.agreed_size(_NAME, size, self._limit), self.runner.least)
        if smallest < size:
            self._shrink(smallest, "on another rank")

    def _shrink(self, size: int, where: str) -> None:
        before = self.runner.size
        self.runner.cut_into(size)
        warn_user(
            f"For '{_NAME}', memory ran out {where} with {self.runner.size_is}={before}, found by 'auto': "
            f"training goes on with {size}, on all ranks. No batch is lost."
        )

    # -- one batch, on this rank alone ---------------------------------------------------------------------------------

    def _as_it_fits(self, batch: Batch) -> Any:
        """Add a batch to the window. Whenever memory runs out, try again with smaller micro-batches."""
        while True:
            self._note()
            try:
                added = self.runner.add(batch)
                some = bool(added[0].asnumpy().any())  # waits: the error may come after the call
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
            known: Any = self.runner.size
            samples = batch.inputs[0].shape[self._cell.first_axis]
            size = known if self._cell.trims else min(known, samples)  # a short batch is one micro-batch
            if size <= self.runner.least:
                self.runner.cut_into(known)  # a graph that has failed does not run again
                search.agreed_size(_NAME, 0, self._limit)  # raises, on all ranks
            self._shrink(max(-(-size // 2), self.runner.least), f"({failed}) for {samples} samples")
            batch = self.runner.prepare(tuple(batch.inputs))

    def _note(self) -> None:
        """Keep a copy of everything that a batch on this rank alone may change."""
        window = self._components.window
        left_out = [*self._components.weights, *(self._constants or ())]
        if self._components.is_between_windows:  # they are zero
            left_out += window.store.get_parameters()
        self._before = Snapshot(window, leave_out=left_out)

    def _put_back(self) -> None:
        self._components.window.store.reset_eagerly()
        self._before.restore()

    def _find_constants(self) -> None:
        """Find what a batch has not changed: frozen Parameters and constants, which may be many. They need no copy."""
        network = {id(tensor) for tensor in self._components.network.get_parameters()}
        self._constants = [
            tensor
            for tensor in self._before.unchanged()
            if id(tensor) in network or not isinstance(tensor, ms.Parameter)
        ]
