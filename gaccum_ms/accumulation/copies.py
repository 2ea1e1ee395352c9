"""The copies of a network in a step's graphs, if it draws random numbers or has forward hooks.

A graph has the network in up to three places: in its loop, before it (the first micro-batch shows the outputs' shapes),
and after it (the smaller last micro-batch). Each place has a copy with seeds of its own. So no two micro-batches have
the same dropout masks, and no hook runs twice. Copies are made at each compilation, with the network's flags of that
time. A network that runs eagerly, or has neither random numbers nor hooks, is not copied.
"""

from __future__ import annotations

from collections.abc import Callable

from mindspore import nn

from gaccum_ms.backend.graphs import runs_eagerly_now


class Copies:
    """The measures of a window, each with a copy of the network. `make` returns the measure on the copy of a number,
    0 for the network itself; None if the network needs no copy."""

    def __init__(self, make: Callable[[int], nn.Cell | None] | None = None) -> None:
        self._make = make
        self._number = 0
        self.made: dict[str, nn.Cell] = {}  # by their places, in the graph that is compiled

    def begin(self) -> None:
        """At the beginning of a compilation, whatever graph the window is in."""
        self.made.clear()

    def of(self, place: str, measure: nn.Cell) -> nn.Cell:
        """The measure for a place in the graph that is being compiled."""
        if self._make is None or runs_eagerly_now():
            return measure
        if place not in self.made:  # the compiler asks several times
            copy = self._make(self._number)
            self.made[place] = measure if copy is None else copy
            self._number += copy is not None
        return self.made[place]
