"""Watches the copy of this process in which a trial runs (child.py), and ends it before both exceed the memory limit.

The copy's own memory is read a thousand times a second. To read the memory of both together takes Linux some 10 ms, so
that is done when the copy has taken half of what was free, unless it could take the other half meanwhile. The copy is
ended while as much is free as it could take in two looks, at the highest speed at which it has taken memory so far.

On a machine without other load this keeps the limit to 3 %. Beside other programs this process may have to wait for a
core while the copy goes on, and the limit may be exceeded by more.
"""

from __future__ import annotations

import math
import os
import select
import time
from pathlib import Path
from typing import Any

from gaccum_ms.memory.proc import own, sizes_in

_LOOKS_EVERY = 0.001  # seconds between two looks
_STUCK_AFTER = 20  # seconds without any work


class TooMuchMemory(MemoryError):
    """The copy was ended because both processes would have exceeded the limit, or by the system. `reached` : resident
    bytes of the copy; the limit if the system has ended it."""

    def __init__(self, message: str, reached: int) -> None:
        super().__init__(message)
        self.reached = reached


class StuckError(RuntimeError):
    """The copy was ended because it waited for something that only another thread of this process could do."""


class Watch:
    """Watches the copies of a search, one after the other. `limit` : bytes of this process and a copy together."""

    def __init__(self, owner: str, limit: int) -> None:
        self.owner = owner
        self.limit = limit

    def read_answer(self, pipe: Any, child: int) -> bytes:
        """What a copy writes into a pipe until it closes it: a byte when its run begins, and the answer. Raises
        TooMuchMemory, or StuckError after 20 seconds of nothing."""
        text = b""
        size, looked_at, speed = 0, time.monotonic(), 0.0  # bytes, seconds, bytes per second
        free, reads_at = 0.0, 0.0  # bytes for both; the copy's size at which they are read again
        worked, worked_at = 0.0, looked_at
        while True:
            if select.select([pipe], [], [], _LOOKS_EVERY)[0]:
                more = os.read(pipe.fileno(), 1 << 16)
                if not more:
                    return text
                text += more
                size = 0  # as at the beginning: speed counts from here
            before, began, looked_at = size, looked_at, time.monotonic()
            sizes = sizes_in(f"/proc/{child}/status")
            size = sizes["RssAnon"]
            if before and text:
                speed = max(speed, (size - before) / (looked_at - began))
                free -= size - before
            if size > reads_at and text:
                free = self.limit - _together(child)
                taken_meanwhile = speed * (time.monotonic() - looked_at)
                reads_at = size + free / 2 if free / 2 > taken_meanwhile else math.inf
            if free < 2 * speed * _LOOKS_EVERY:
                raise TooMuchMemory(
                    f"For '{self.owner}', a trial reached {self.limit - free:.0f} bytes, but may have {self.limit}.",
                    sizes["VmRSS"],
                )
            work = _seconds_of_work(child)
            if work > worked:
                worked, worked_at = work, looked_at
            elif looked_at - worked_at > _STUCK_AFTER:
                raise StuckError(
                    f"For '{self.owner}', a trial runs in a copy of this process, which has none of its other threads, "
                    f"but got a copy that waits for something for {_STUCK_AFTER} s. Search in a program's beginning, "
                    f"before it starts threads and iterates over data sets."
                )


def _together(child: int) -> int:
    """Bytes of this process and the copy together, with shared memory counted once."""
    sizes = sizes_in(f"/proc/{child}/smaps_rollup")
    return own("VmRSS") + sum(sizes[name] for name in ("Private_Clean", "Private_Dirty", "Pss_Shmem"))


def _seconds_of_work(process: int) -> float:
    """The process's seconds on the CPU."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()  # before it is the name
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
