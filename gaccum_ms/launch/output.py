"""This program's standard output, which shows rank 0's output as long as somebody reads it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import IO


class Tail:
    """Copies a growing file to this program's standard output, until nobody reads that."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self.unread = False

    def copy(self) -> None:
        """Copy what was added since the last call."""
        if self._file is None and self._path.exists():
            self._file = self._path.open("rb")
        if self._file is not None and not self.unread:
            self.unread = not show(self._file.read())


def show(data: bytes) -> bool:
    """Write to standard output; return whether somebody reads it."""
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    except BrokenPipeError:
        with Path(os.devnull).open("wb") as nowhere:  # for the rest of the buffer, at this program's end
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return False
    return True
