"""This program's standard output, which shows rank 0's output as long as somebody reads it."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path


def show(text: str) -> bool:
    """Write to standard output, in UTF-8 with any locale; a path that is none stays as it is. Return whether it worked,
    or the reader has gone away ( `| head` )."""
    error = write(text.encode(errors="surrogateescape"))
    return error is None or isinstance(error, BrokenPipeError)


def write(data: bytes) -> OSError | None:
    """Write to standard output; return the error. After an error, everything else is written nowhere."""
    if sys.stdout is None:  # this program was started without one
        return OSError(errno.EBADF, os.strerror(errno.EBADF))
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    except OSError as error:
        with Path(os.devnull).open("wb") as nowhere:  # for the rest of the buffer, at this program's end
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"note: standard output takes no more: {error.strerror}", file=sys.stderr, flush=True)
        return error
    return None
