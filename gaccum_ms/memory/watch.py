"""Watches the copy of this process in which a trial runs (child.py), and ends it before both exceed the memory limit.

Linux reports the memory of both together, but slowly. So it is read again only when the copy has grown by half of the
remaining room. Near the limit, the copy runs in short turns, and is stopped for each reading. It is ended if the
remaining room could be used up before the next reading.

On a busy machine this process has to wait for a core, and looks late. Two things keep the limit there. The copy stops
itself after a while (turns.py). And after a late look the reserve is larger than what a copy has grown by until then.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from gaccum_ms.memory.proc import own, sizes_in

_LOOKS_EVERY = 0.001  # seconds between two looks
_BETWEEN_LOOKS = 10_000_000  # bytes that the copy takes between two looks, besides a tensor of a Parameter's size
_TURN = 0.0005  # seconds of a turn near the limit; half as many bytes are kept free then
_LATE = 0.01  # seconds: a look that is later by more than this is late; on an idle machine there are few
_GROWS = 1.5  # times the most that a copy has grown between two late looks: what it may take until the next one
_NOTHING = 1_000_000  # bytes that are not worth another reading
_BEHIND = 10  # `nice` steps of the copy below this process, near the limit
_HANGS_AFTER = 60  # seconds without any work


class TooMuchMemory(MemoryError):
    """The copy was ended because both processes would have exceeded the limit, or by the system.

    Args:
        message (str): The message.
        reached (int): Resident bytes of the copy; the limit if the system has ended it.
    """

    def __init__(self, message: str, reached: int) -> None:
        super().__init__(message)
        self.reached = reached


class Watch:
    """Watches the copies of a search, one after the other.

    Args:
        owner (str): The name in errors.
        limit (int): The limit of this process and a copy together, in bytes.
    """

    def __init__(self, owner: str, limit: int) -> None:
        self.owner = owner
        self.limit = limit
        self._grown = 0  # bytes: the most until a late look, in all copies so far

    def read_answer(self, pipe: Any, child: int, at_once: int) -> bytes:
        """What a copy writes into a pipe until it closes it.

        Args:
            pipe (file): The pipe's end for reading.
            child (int): The copy's process id.
            at_once (int): Bytes of the largest tensor that it writes at memory's speed.

        Raises:
            TooMuchMemory: If the limit would be exceeded.
            RuntimeError: If the copy does nothing for a minute.
        """
        text = b""
        before = own("RssAnon")  # the copy begins with as much
        looks_at, near = 0, False
        worked, at = 0.0, time.monotonic()
        while True:
            waits, began = _TURN if near else _LOOKS_EVERY, time.monotonic()
            if select.select([pipe], [], [], waits)[0]:
                more = os.read(pipe.fileno(), 1 << 16)
                text += more
                if not more:
                    return text
            if near:
                os.kill(child, signal.SIGSTOP)
            sizes = sizes_in(f"/proc/{child}/status")
            # Not of VmRSS: it grows with the pages of files that the copy reads too, which this process has already.
            if time.monotonic() - began > waits + _LATE and self._is_most(sizes["RssAnon"] - before):
                looks_at = 0  # with a larger reserve, both have to be read again
            before = sizes["RssAnon"]
            if sizes["VmRSS"] > looks_at:
                together = _together(child)
                far, near = not near, near or self._room(together, at_once, False) < _NOTHING
                room = self._room(together, at_once, near)
                if room < _NOTHING:
                    message = (
                        f"For '{self.owner}', a trial reached {self.limit - room} bytes, but may have {self.limit}."
                    )
                    raise TooMuchMemory(message, sizes["VmRSS"])
                if far and near:
                    _put_behind(child)
                looks_at = sizes["VmRSS"] + room // 2
            state, work = _state_and_work(child)
            if state == "T":  # stopped, by itself or here
                os.kill(child, signal.SIGCONT)
            if work > worked:
                worked, at = work, time.monotonic()
            elif time.monotonic() - at > _HANGS_AFTER:
                raise RuntimeError(
                    f"For '{self.owner}', a trial runs in a copy of this process, which has none of its other threads, "
                    f"but got a copy that waits for something for {_HANGS_AFTER} s. Search in a program's beginning, "
                    f"before it starts threads and iterates over data sets."
                )

    def _room(self, together: int, at_once: int, near: bool) -> int:
        """Bytes that both processes may still grow, besides what the copy may take until the next look."""
        between = _BETWEEN_LOOKS + at_once
        reserve = between // 2 if near else between
        return self.limit - together - max(reserve, int(_GROWS * self._grown))

    def _is_most(self, grown: int) -> bool:
        """Whether a copy has grown by more bytes until a late look than ever before. It is remembered."""
        is_most = grown > self._grown
        self._grown = max(self._grown, grown)
        return is_most


def _together(child: int) -> int:
    """Bytes of this process and the copy together, with shared memory counted once. The copy is stopped."""
    os.kill(child, signal.SIGSTOP)
    sizes = sizes_in(f"/proc/{child}/smaps_rollup")
    return own("VmRSS") + sum(sizes[name] for name in ("Private_Clean", "Private_Dirty", "Pss_Shmem"))


def _put_behind(child: int) -> None:
    """Let this process, which watches the copy, run as soon as it wakes. It costs the copy time beside other programs,
    so it is not done before."""
    behind = os.getpriority(os.PRIO_PROCESS, 0) + _BEHIND
    for thread in os.listdir(f"/proc/{child}/task"):
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(thread), behind)


def _state_and_work(process: int) -> tuple[str, float]:
    """The letter of the process's state, and its seconds on the CPU."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
