"""``MaxTokens("auto")``: the number of tokens in a micro-batch is found at the first batch, and halved when memory runs
out (halving.py).
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mindspore as ms

from gaccum_ms.training.halving import Halving

if TYPE_CHECKING:
    from gaccum_ms.cell import GradAccumulationCell
    from gaccum_ms.splitting.splitter import Splitter
    from gaccum_ms.training.python_split import PythonSplit
    from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell as Step


class AutoTokens(Halving):
    """Finds the number of tokens in a step's micro-batches, and trains with it.

    Args:
        step (TrainOneStepWithGradAccumulationCell): The step.
        cell (GradAccumulationCell): The options.
        split (PythonSplit): Trains on the micro-batches that `MaxTokens` makes.
    """

    _of = "max_tokens"

    def __init__(self, step: Step, cell: GradAccumulationCell, split: PythonSplit) -> None:
        super().__init__(step, cell)
        self.split = split
        self._tokens: Any = cell.split  # the MaxTokens

    def parts(self, batch: Sequence[Any]) -> list[tuple[ms.Tensor, ...]]:
        """The checked micro-batches of a batch."""
        if self.size is None:
            self._find(batch)
        made = self.split.parts(batch)
        self.size, self._least = self._tokens.max_tokens, self._tokens.widths[-1]
        return made

    def __call__(self, batch: Sequence[Any], parts: Sequence[tuple[ms.Tensor, ...]]) -> Any:
        """Train on a batch, given as its micro-batches too; returns what the step returns."""
        made = [parts]

        def add() -> tuple[Any, bool]:
            added = self.split.add(made.pop() if made else self.parts(batch))
            return added, bool(added[0].asnumpy().any())

        added = self._as_it_fits(add, batch[0].shape[0])
        if self._step.window.open.is_full:
            self._agree_at_the_end()
        return self.split.end(added)

    def rehearse(self, split: Splitter) -> None:
        """In a trial: train on the micro-batches of `split` , and raise the error if they do not fit."""
        self.split.split_by(split)
        self._step._split = self.split

    def _set(self, size: int) -> None:
        self._tokens.max_tokens = self.size = size
        self.split.renew_graphs()
        gc.collect()
