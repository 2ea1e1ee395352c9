"""Reads the JSON lines of a WindowMonitor, also of a training that was resumed, and of several in one file.

A resumed training appends to the file of the interrupted one, and makes the updates after its checkpoint again. Their
new records replace the old ones. A training that begins with the first update again is another one.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FIRST_UPDATE = 1
MOST_UPDATES = 2**31 - 1  # the training counts them in an int32
SLOW = 5.0  # a window of so many times the median's seconds for an item compiles, or something else has stopped it
LARGEST = 1e100  # a chart has room for sums, differences and margins of what it shows, also by powers of ten


class RecordError(Exception):
    """A file that cannot be read, or that holds no record."""


@dataclass
class Window:
    """One line. `lost` : the updates that were skipped, and the micro-batches that were dropped, so far. `slow` :
    whether it took far longer for what it holds than most, as one that compiles."""

    values: dict[str, Any]
    lost: tuple[float, float] = (0, 0)
    slow: bool = False

    @property
    def updated(self) -> bool:
        return self.values.get("updated", True) is True

    @property
    def update(self) -> int:
        """The update that the window made, or would have made."""
        return int(self.values["update"]) + (not self.updated)

    @property
    def pace(self) -> float:
        """Seconds for each item, or for each batch of a window without a count."""
        size = self.number("count", self.number("batches"))
        return self.number("seconds") / size if size > 0 else math.nan

    def numbers(self, name: str) -> list[float]:
        """The numbers of a list, or the only number; NaN for what is none, or too large for a chart."""
        value = self.values.get(name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        return [float(each) if type(each) in (int, float) and abs(each) <= LARGEST else math.nan for each in values]

    def number(self, name: str, default: float = math.nan) -> float:
        return next(iter(self.numbers(name)), default)


@dataclass
class Record:
    """A file: the windows of its last training, those that it has replaced after a resume, those of the `earlier`
    trainings before it, and notes."""

    path: Path
    windows: list[Window] = field(default_factory=list)
    replaced: list[list[Window]] = field(default_factory=list)
    earlier: list[list[Window]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The path as text that can be written in UTF-8, which a path need not be."""
        return os.fsencode(self.path).decode("utf-8", "replace")

    @property
    def faint(self) -> list[list[Window]]:
        """The windows that are not of the last training, or that it has made again."""
        return [*self.earlier, *self.replaced]

    def add(self, window: Window) -> None:
        if self.windows and window.update < self.windows[-1].update + self.windows[-1].updated:
            count = sum(before.update < window.update for before in self.windows)
            self.replaced.append(self.windows[count:])
            del self.windows[count:]
            if window.update == FIRST_UPDATE:
                self.earlier += self.replaced
                self.replaced = []
        skipped, dropped = self.windows[-1].lost if self.windows else (0, 0)
        window.lost = skipped + (not window.updated), dropped + window.number("dropped_micro_batches", 0)
        window.values["lost"] = [number or None for number in window.lost]  # no chart without any
        window.values["rate"] = window.number("count") / (window.number("seconds") or math.nan)
        self.windows.append(window)

    def find_slow(self) -> None:
        """Find the windows that compile by their time: the first of each start, and those of new shapes."""
        paced = [window for part in (self.windows, *self.faint) for window in part if 0 < window.pace < math.inf]
        usual = statistics.median_low(window.pace for window in paced) if paced else math.nan
        for window in paced:
            window.slow = window.pace > SLOW * usual


def read(path: Path) -> Record:
    """Read a file."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise RecordError(f"cannot read '{path}': {error.strerror}") from None
    record, bad = Record(path), []
    for number, line in enumerate(lines, start=1):
        window = _window(line)
        if window is not None:
            record.add(window)
        elif line.strip():
            bad.append(number)
    if not record.windows:
        why = f"line {bad[0]} is no window of a WindowMonitor" if bad else "it is empty: no window has ended yet"
        raise RecordError(f"'{path}' holds no record: {why}")
    record.find_slow()
    if bad:
        record.notes.append(f"{record.name}: {len(bad)} line(s) left out, from line {bad[0]} on: no whole window")
    if record.replaced:
        record.notes.append(f"{record.name}: the training was resumed; updates that it made again are faint.")
    if record.earlier:
        record.notes.append(
            f"{record.name}: another training has begun in this file; those before it are faint, and not in the facts."
        )
    return record


def _window(line: str) -> Window | None:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):  # the latter: brackets within brackets, a thousand deep
        return None
    is_window = isinstance(values, dict) and "loss" in values and type(values.get("update")) is int
    return Window(values) if is_window and abs(values["update"]) <= MOST_UPDATES else None
