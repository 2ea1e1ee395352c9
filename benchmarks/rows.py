"""The measurements of each program, the ratios between them, and their file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

WHOLE = "whole"  # the reference way

# Seconds of first calls in fresh processes, by network, way and micro_size.
FirstCalls = dict[tuple[str, str, int], list[float]]


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
    note: str = ""

    @property
    def seconds(self) -> float | None:
        """Seconds per update: the median over rounds of each round's median."""
        return median(map(median, self.turns)) if self.turns else None

    @property
    def growth(self) -> int | None:
        """The growth of peak memory in bytes, from micro-batches of one sample to the measured size."""
        return None if self.peak is None or self.base_peak is None else self.peak - self.base_peak


@dataclass
class Results:
    """All measurements of one run. `kernels` has the results of kernels.py, by network."""

    head: str
    rows: list[Row] = field(default_factory=list)
    first_calls: FirstCalls = field(default_factory=dict)
    kernels: dict[str, dict[str, Any]] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        calls = [[*key, seconds] for key, seconds in self.first_calls.items()]
        path.write_text(json.dumps({**asdict(self), "first_calls": calls}))

    @classmethod
    def load(cls, path: Path) -> Results:
        kept = json.loads(path.read_text())
        first_calls = {(network, way, size): seconds for network, way, size, seconds in kept["first_calls"]}
        return cls(kept["head"], [Row(**row) for row in kept["rows"]], first_calls, kept["kernels"])


def find(rows: Iterable[Row], network: str, way: str, micro_size: int = 1, processes: int = 1) -> Row | None:
    wanted = (network, way, micro_size, processes)
    return next((row for row in rows if (row.network, row.way, row.micro_size, row.processes) == wanted), None)


def round_ratios(row: Row | None, base: Row | None) -> list[float]:
    """The ratio of a row's time to that of `base` , in each round: two turns of one round see the machine in the same
    state, but two medians over all rounds may not. Empty for rows of different groups."""
    if row is None or base is None or row.group != base.group or len(row.turns) != len(base.turns):
        return []
    return [median(own) / median(other) for own, other in zip(row.turns, base.turns, strict=True)]


def time_ratio(rows: Sequence[Row], row: Row | None, base: Row | None) -> float | None:
    """The ratio of a row's time to that of `base` . If they are in different groups, each is divided by the time of the
    whole batch in its own group."""
    if row is None or base is None:
        return None
    if row.group == base.group:
        return _median(round_ratios(row, base))
    own, other = whole_of(rows, row), whole_of(rows, base)
    if own is None or other is None or (own.network, own.processes) != (other.network, other.processes):
        return None
    above, below = _median(round_ratios(row, own)), _median(round_ratios(base, other))
    return above / below if above and below else None


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


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
