"""The copies of a network in a step's graphs, if it draws random numbers or has forward hooks.

A graph has the network in up to three places: in its loop, before it (the first micro-batch shows the outputs' shapes),
and after it (the smaller last micro-batch). Each place has a copy with seeds of its own. So no two micro-batches have
the same dropout masks, and no hook runs twice. Copies are made at each compilation, with the network's flags of that
time. A network that runs eagerly, or has neither random numbers nor hooks, is not copied.
"""

from __future__ import annotations

from mindspore import nn

from gaccum_ms.backend.graphs import graph_run, runs_eagerly_now
from gaccum_ms.backend.random_operators import forbid_reuse, needs_copies


class Copies:
    """The copies of a window's measure, each with a copy of the network."""

    def __init__(self) -> None:
        self._number = 0
        self.made: dict[str, nn.Cell] = {}  # by their places, in the graph that is compiled

    def begin(self) -> None:
        """At the beginning of a compilation, whatever graph the window is in."""
        self.made.clear()

    def of(self, place: str, measure: nn.Cell) -> nn.Cell:
        """The measure for a place in the graph that is being compiled."""
        if runs_eagerly_now() or not measure.may_be_copied:
            return measure
        if place not in self.made:  # the compiler asks several times
            self.made[place] = measure
            if needs_copies(measure.network):
                forbid_reuse(graph_run(otherwise=measure), measure.network)
                self.made[place] = measure.copy(self._number)
                self._number += 1
        return self.made[place]
