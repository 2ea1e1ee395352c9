"""Reads the JSON lines of a WindowMonitor, also of a training that was resumed, and of several in one file.

A resumed training appends to the file of the interrupted one, and makes the updates after its checkpoint again. Their
new records replace the old ones. So do those of a training that begins anew in the same file.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class RecordError(Exception):
    """A file that cannot be read, or that holds no record."""


@dataclass
class Window:
    """One line. `lost` : the updates that were skipped, and the micro-batches that were dropped, so far."""

    values: dict[str, Any]
    lost: tuple[float, float] = (0, 0)

    @property
    def updated(self) -> bool:
        return self.values.get("updated", True) is True

    @property
    def update(self) -> int:
        """The update that the window made, or would have made."""
        return int(self.values["update"]) + (not self.updated)

    def numbers(self, name: str) -> list[float]:
        """The numbers of a list, or the only number; NaN for what was not finite."""
        value = self.values.get(name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        return [math.nan if each is None else float(each) for each in values]

    def number(self, name: str, default: float = math.nan) -> float:
        return next(iter(self.numbers(name)), default)


@dataclass
class Record:
    """A file: its windows, those that later ones have replaced, and notes."""

    path: Path
    windows: list[Window] = field(default_factory=list)
    replaced: list[list[Window]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, window: Window) -> None:
        if self.windows and window.update < self.windows[-1].update + self.windows[-1].updated:
            count = sum(before.update < window.update for before in self.windows)
            self.replaced.append(self.windows[count:])
            del self.windows[count:]
        skipped, dropped = self.windows[-1].lost if self.windows else (0, 0)
        window.lost = skipped + (not window.updated), dropped + window.number("dropped_micro_batches", 0)
        window.values["lost"] = [number or None for number in window.lost]  # no chart without any
        window.values["rate"] = window.number("count") / (window.number("seconds") or math.nan)
        self.windows.append(window)


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
    if bad:
        record.notes.append(f"{path}: {len(bad)} line(s) left out, from line {bad[0]} on: no whole window")
    if record.replaced:
        record.notes.append(
            f"{path}: the training was resumed or begun anew; updates that were made again are faint, and only their "
            f"last time is in the facts."
        )
    return record


def _window(line: str) -> Window | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    is_window = isinstance(values, dict) and "loss" in values and isinstance(values.get("update"), int)
    return Window(values) if is_window else None
