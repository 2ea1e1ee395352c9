"""Appends callbacks' records to a file, as lines of JSON."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


def json_lines_path(owner: str, json_lines: Any) -> Path | None:
    """The checked path, absolute because the working folder may change in mid-training."""
    if json_lines is not None and not isinstance(json_lines, (str, Path)):
        raise TypeError(
            f"For '{owner}', the argument 'json_lines' must be a path, but got {json_lines!r} of type "
            f"'{type(json_lines).__name__}'."
        )
    return None if json_lines is None else Path(json_lines).absolute()


def begin_json_lines(path: Path) -> None:
    """Create the file, so that an unwritable one is an error now, not after the first window.

    A last line that a killed training has cut short is ended, so that the next record has a line of its own.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    if path.is_file() and path.stat().st_size:  # not a pipe, which has no last byte
        with path.open("a+b") as file:
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")


def append_json_line(path: Path, record: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({name: _finite(value) for name, value in record.items()}) + "\n")


def _finite(value: Any) -> Any:
    """The value, with None for NaN and infinity, which JSON lacks."""
    if isinstance(value, tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
