"""The copies of a network in a step's graphs, if it draws random numbers or has forward hooks.

A graph runs the network in its loop, for the first micro-batch before it where that must be known, and for the smaller
last one after it. A batch of another shape has another graph. Each of these is a copy with seeds of its own, so that no
two micro-batches have the same dropout masks, and none runs its hooks twice. Copies are made at each compilation, so
that they have the network's flags of that time. Run eagerly, and without any of these, there is one network.
"""

from __future__ import annotations

from collections.abc import Callable

from mindspore import nn

from gaccum_ms.backend.graphs import runs_eagerly_now


class Copies:
    """The weighings of a window, each with a copy of the network. `make` returns the weighing on the copy of a number,
    0 for the network itself; None if the network needs no copy."""

    def __init__(self, make: Callable[[int], nn.Cell | None] | None = None) -> None:
        self._make = make
        self._number = 0
        self.made: dict[str, nn.Cell] = {}  # by their places, in the graph that is compiled

    def begin(self) -> None:
        """At the beginning of a compilation, whatever graph the window is in."""
        self.made.clear()

    def of(self, place: str, weighing: nn.Cell) -> nn.Cell:
        """The weighing for a place in the graph that is being compiled."""
        if self._make is None or runs_eagerly_now():
            return weighing
        if place not in self.made:  # the compiler asks several times
            copy = self._make(self._number)
            self.made[place] = weighing if copy is None else copy
            self._number += copy is not None
        return self.made[place]
