"""Reads the JSON lines of a WindowMonitor, also of a training that was resumed.

A resumed training appends to the file of the interrupted one, and makes the updates after its checkpoint again. Their
new records replace the old ones.
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
    """One line: its numbers, NaN if they are not there or not finite. `skipped` and `dropped` count the updates that
    were skipped and the micro-batches that were dropped so far."""

    values: dict[str, Any]
    skipped: int = 0
    dropped: int = 0

    @property
    def updated(self) -> bool:
        return self.values.get("updated", True) is True

    @property
    def update(self) -> int:
        """The update that the window made, or would have made."""
        return int(self.values["update"]) + (not self.updated)

    def number(self, name: str) -> float:
        return _number(self.values.get(name))

    def numbers(self, name: str) -> list[float]:
        value = self.values.get(name)
        return [_number(one) for one in value] if isinstance(value, list) else []


@dataclass
class Record:
    """A file: its windows, the windows that a resumed training has replaced, and notes on lines that were left out."""

    path: Path
    windows: list[Window] = field(default_factory=list)
    replaced: list[list[Window]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read(path: Path) -> Record:
    """Read a file.

    Raises:
        RecordError: If it cannot be read, or no line of it is a window.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise RecordError(f"cannot read '{path}': {error.strerror}") from None
    record, windows, bad = Record(path), [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        window = _window(line)
        if window is not None:
            windows.append(window)
        else:
            bad.append(number)
    if not windows:
        why = f"line {bad[0]} is no window of a WindowMonitor" if bad else "it is empty: no window has ended yet"
        raise RecordError(f"'{path}' holds no record: {why}")
    if bad:
        which = "the last line is cut short" if bad == [len(lines)] else f"no window in line {_listed(bad)}"
        record.notes.append(f"{path.name}: {which}, which was left out")
    for window in windows:
        _add(record, window)
    return record


def _add(record: Record, window: Window) -> None:
    before = record.windows
    if before and window.update < before[-1].update + before[-1].updated:
        kept = [one for one in before if one.update < window.update]
        record.windows, replaced = kept, before[len(kept) :]
        record.replaced.append(replaced)
    last = record.windows[-1] if record.windows else Window({})
    window.skipped = last.skipped + (not window.updated)
    window.dropped = last.dropped + int(_finite_or_0(window.number("dropped_micro_batches")))
    record.windows.append(window)


def _window(line: str) -> Window | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    if not isinstance(values, dict) or "loss" not in values:
        return None
    return Window(values) if isinstance(values.get("update"), int) else None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def _finite_or_0(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:5]))
    return shown if len(numbers) <= 5 else f"{shown} and {len(numbers) - 5} more"
