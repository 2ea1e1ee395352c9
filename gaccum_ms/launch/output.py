"""This program's standard output, which shows rank 0's output as long as somebody reads it, and its messages."""

from __future__ import annotations

import errno
import os
import select
import sys
from pathlib import Path
from typing import TextIO


def show(text: str) -> bool:
    """Write to standard output, in UTF-8 with any locale; a path that is none stays as it is. Return whether it worked,
    or the reader has gone away ( `| head` )."""
    error = write(text.encode(errors="surrogateescape"))
    return error is None or isinstance(error, BrokenPipeError)


def say(text: str) -> None:
    """Write a message to standard error; nowhere, if that takes nothing."""
    _write(sys.stderr, text.encode(errors="backslashreplace"))


def write(data: bytes) -> OSError | None:
    """Write to standard output; return the error. After an error, everything else is written nowhere."""
    error = _write(sys.stdout, data)
    if error and sys.stdout and not isinstance(error, BrokenPipeError):
        say(f"note: standard output takes no more: {error.strerror}\n")
    return error


def _write(stream: TextIO | None, data: bytes) -> OSError | None:
    """Write all, also where the system takes a part at a time."""
    if stream is None:  # this program was started without one
        return OSError(errno.EBADF, os.strerror(errno.EBADF))
    try:
        stream.flush()
        raw, rest = getattr(stream.buffer, "raw", stream.buffer), memoryview(data)
        while rest:
            written = raw.write(rest)
            if written is None:  # another program has made it non-blocking
                select.select([], [stream], [])
            rest = rest[written or 0 :]
    except OSError as error:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
        return error
    return None
