"""``MaxTokens("auto")``: the number of tokens in a micro-batch is found at the first batch, and halved when memory runs
out (automatic_size.py).
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from gaccum_ms.training.automatic_size import AutomaticSize, RehearsedStep
from gaccum_ms.training.runner import Batch

if TYPE_CHECKING:
    from gaccum_ms.cell import GradAccumulationCell
    from gaccum_ms.memory.trial import MakeStep, StepOnTrial
    from gaccum_ms.training.parts import Parts
    from gaccum_ms.training.python_split import PythonSplit


class FoundTokens(AutomaticSize):
    """Finds the number of tokens in a step's micro-batches, and trains with it."""

    _of = "max_tokens"
    _tokens: Any

    def __init__(self, parts: Parts, cell: GradAccumulationCell, make_step: MakeStep, split: PythonSplit) -> None:
        super().__init__(parts, cell, make_step)
        self._split = split
        self.split = self._tokens = split.split  # the MaxTokens of this step

    def prepare(self, inputs: tuple[Any, ...]) -> Batch:
        if self.size is None:
            self._find(inputs)
        batch = self._split.prepare(inputs)
        self.size, self._least = self._tokens.max_tokens, self._tokens.widths[-1]
        return batch

    def run(self, batch: Batch) -> Any:
        batches = [batch]

        def add() -> tuple[Any, bool]:
            added = self._split.add(batches.pop() if batches else self.prepare(tuple(batch.inputs)))
            return added, bool(added.sums.asnumpy().any())

        added = self._as_it_fits(add, batch.inputs[0].shape[0])
        if self._parts.window.open.is_full:
            self._agree_at_the_end()
        return self._split.end(added)

    def rehearsed(self, size: Any) -> StepOnTrial:
        self._split.split_by(size)
        return RehearsedStep(self._parts, self._split)

    def _set(self, size: int) -> None:
        self.size = size
        self._tokens.cut_into(size)
        self._split.renew_graphs()
        gc.collect()
