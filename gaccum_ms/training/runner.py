"""How Python calls a training step: a runner for each way, with the same methods.

OneGraph        the step's own graph                                    (one_graph.py)
CompilerGraph   the step's graph, in semi-auto and auto parallel mode   (one_graph.py)
PythonSplit     a function cuts the batch                               (python_split.py)
TwoGraphs       a graph adds, another one ends the window               (two_graphs.py)
FoundSize       finds the size with which one of the last two trains    (found_size.py)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mindspore as ms

if TYPE_CHECKING:
    from gaccum_ms.splitting.splitter import Splitter
    from gaccum_ms.training.components import Components


@dataclass(frozen=True)
class Batch:
    """A checked batch."""

    inputs: Sequence[Any]
    micro_batches: Callable[[], Sequence[Sequence[ms.Tensor]]]
    network_inputs: Sequence[Any] | None = None  # the inputs, if the network gets them; a function makes others


class Runner:
    """Trains a step on one batch, and ends its windows."""

    _components: Components
    split: Splitter | None = None  # what splits the batches in Python, of this step alone

    def prepare(self, inputs: tuple[Any, ...]) -> Batch:
        """The checked batch. What is wrong with it is one clear error, before anything runs."""
        raise NotImplementedError

    def run(self, batch: Batch) -> Any:
        """Train on the batch; returns what the step returns."""
        raise NotImplementedError

    def agree(self) -> None:
        """Before a flush: what all ranks must agree on; by default nothing. With several ranks, possibly a
        collective."""

    def flush(self) -> bool:
        """End the open window; returns whether there was an update. Only if windows may have several batches."""
        end_window: Any = self._components.end_window
        return end_window.flush()
