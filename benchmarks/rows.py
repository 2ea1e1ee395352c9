"""The measurements of each program, and the ratios between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

WHOLE = "whole"  # the reference way


@dataclass
class Row:
    """The measurements of one program; if it was not measured, they are None or empty, and `note` has the reason.

    Programs of one `group` were alive at the same time and took turns, so their rounds can be paired.
    """

    network: str
    way: str
    micro_size: int
    processes: int = 1
    group: str = ""
    batch: int = 0  # samples, over all processes
    turns: list[list[float]] = field(default_factory=list)  # for each round, the seconds of each update
    first_call: float | None = None
    trains: bool | None = None
    peak: int | None = None
    base_peak: int | None = None  # the same program's peak with micro-batches of one sample
    weight_bytes: int = 0
    threads: str = ""
    details: dict[str, Any] = field(default_factory=dict)  # what the program says of its updates
    note: str = ""

    @property
    def seconds(self) -> float | None:
        """Seconds per update: the median over rounds of each round's median."""
        return median(map(median, self.turns)) if self.turns else None

    @property
    def growth(self) -> int | None:
        """The growth of peak memory in bytes, from micro-batches of one sample to the measured size."""
        return None if self.peak is None or self.base_peak is None else self.peak - self.base_peak


def find(rows: Iterable[Row], network: str, way: str, micro_size: int = 1, processes: int = 1) -> Row | None:
    wanted = (network, way, micro_size, processes)
    return next((row for row in rows if (row.network, row.way, row.micro_size, row.processes) == wanted), None)


def round_ratios(row: Row | None, base: Row | None) -> list[float]:
    """The ratio of a row's time to that of `base` , in each round: two turns of one round see the machine in the same
    state, but two medians over all rounds may not. Empty for rows of different groups."""
    if row is None or base is None or row.group != base.group or len(row.turns) != len(base.turns):
        return []
    return [median(own) / median(other) for own, other in zip(row.turns, base.turns, strict=True)]


def time_ratio(row: Row | None, base: Row | None) -> float | None:
    """The median of the ratios in each round."""
    ratios = round_ratios(row, base)
    return median(ratios) if ratios else None


def growth_ratio(row: Row | None, base: Row | None) -> float | None:
    if row is None or base is None or row.growth is None or base.growth is None or base.growth <= 0:
        return None
    return row.growth / base.growth


def beside(rows: Iterable[Row], row: Row, way: str, micro_size: int, processes: int) -> Row | None:
    """Another program of a row's group."""
    return find([one for one in rows if one.group == row.group], row.network, way, micro_size, processes)


def whole_of(rows: Iterable[Row], row: Row) -> Row | None:
    """The whole batch of a row's group."""
    return beside(rows, row, WHOLE, 1, row.processes)
