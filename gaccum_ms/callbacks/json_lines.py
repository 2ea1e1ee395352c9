"""Appends callbacks' records to a file, as lines of JSON."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from gaccum_ms.distributed.ranks import rank_or_0


class JsonLines:
    """A file to which rank 0 appends records. Without a path, and on other ranks, nothing is written."""

    def __init__(self, owner: str, path: Any) -> None:
        if path is not None and not isinstance(path, (str, Path)):
            raise TypeError(
                f"For '{owner}', the argument 'json_lines' must be a path, but got {path!r} of type "
                f"'{type(path).__name__}'."
            )
        # Absolute, because the working folder may change in mid-training.
        self._path = None if path is None else Path(path).absolute()
        self._begun = False

    def begin(self) -> None:
        """Create the file, so that an unwritable one is an error now, not after the first window.

        A last line that a killed training has cut short is ended, so that the next record has a line of its own.
        """
        path = self._path
        self._begun = True
        if path is None or rank_or_0() != 0:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        if path.is_file() and path.stat().st_size:  # not a pipe, which has no last byte
            with path.open("a+b") as file:
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    file.write(b"\n")

    def append(self, record: dict[str, Any]) -> None:
        if not self._begun:  # by a loop, which has no beginning of training
            self.begin()
        if self._path is not None and rank_or_0() == 0:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({name: _finite(value) for name, value in record.items()}) + "\n")


def _finite(value: Any) -> Any:
    """The value, with None for NaN and infinity, which JSON lacks."""
    if isinstance(value, tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
