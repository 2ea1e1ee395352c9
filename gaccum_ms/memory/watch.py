"""Watches the process of a trial (child.py), and ends it before both processes together exceed the memory limit.

Linux reports the memory of both together, but slowly. So it is read again only when the trial's process has grown by
half of the remaining room. Near the limit, that process runs in short turns, and is stopped for each reading. It is
ended if the remaining room could be used up before the next reading.

On a busy machine this process has to wait for a core, and looks later. Two things keep the limit there. The trial's
process stops itself after a while (turns.py). And the reserve is larger than the most by which it has grown between two
looks so far.
"""

from __future__ import annotations

import os
import re
import select
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

_LOOKS_EVERY = 0.001  # seconds between two readings
_BETWEEN_LOOKS = 10_000_000  # bytes that the process takes between two looks, besides a tensor of a Parameter's size
_TURN = 0.0005  # seconds of a turn near the limit; half of _BETWEEN_LOOKS is kept free then
_GROWS = 1.5  # times the most that it has grown between two looks: what it may take until the next one
_NOTHING = 1_000_000  # bytes that are not worth another reading
_BEHIND = 4  # `nice` steps of the process below this one, near the limit
_HANGS_AFTER = 60  # seconds without any work


class TooMuchMemory(MemoryError):
    """The copy was ended, by this module or by the system, because it exceeded the limit.

    Args:
        message (str): The message.
        reached (int): Resident bytes of the copy.
    """

    def __init__(self, message: str, reached: int) -> None:
        super().__init__(message)
        self.reached = reached


class Watch:
    """Watches trials' processes, one after the other.

    Args:
        owner (str): The name in errors.
        limit (int): The limit of this process and a trial's process together, in bytes.
    """

    def __init__(self, owner: str, limit: int) -> None:
        self.owner = owner
        self.limit = limit
        self._grown = 0  # bytes: the most between two looks

    def answer(self, pipe: Any, child: int, at_once: int) -> bytes:
        """What a process writes into a pipe until it closes it.

        Args:
            pipe (file): The pipe's end for reading.
            child (int): The process's id.
            at_once (int): Bytes of the largest tensor that it writes at memory's speed.

        Raises:
            TooMuchMemory: If the limit would be exceeded.
            RuntimeError: If the process does nothing for a minute.
        """
        text = b""
        had, looks_at, near = 0, 0, False
        worked, at = 0.0, time.monotonic()
        while True:
            if select.select([pipe], [], [], _TURN if near else _LOOKS_EVERY)[0]:
                more = os.read(pipe.fileno(), 1 << 16)
                text += more
                if not more:
                    return text
            if near:
                os.kill(child, signal.SIGSTOP)
            used, has = bytes_of("VmRSS", child), bytes_of("RssAnon", child)
            self._grown = max(self._grown, has - (had or has))
            had = has
            if used > looks_at:
                together = _together(child)
                if not near and self._reached(together, at_once) > self.limit - _NOTHING:
                    near = True
                    _put_behind(child)
                reached = self._reached(together, at_once, near)
                if reached > self.limit - _NOTHING:
                    message = f"For '{self.owner}', a trial reached {reached} bytes, but may have {self.limit}."
                    raise TooMuchMemory(message, used)
                looks_at = used + (self.limit - reached) // 2
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

    def _reached(self, together: int, at_once: int, near: bool = False) -> int:
        """The most that both processes may have at the next look, in bytes."""
        between = _BETWEEN_LOOKS + at_once
        return together + max(between // 2 if near else between, int(_GROWS * self._grown))


def _together(child: int) -> int:
    """Bytes of this process and the copy together, with shared memory counted once. The copy is stopped."""
    os.kill(child, signal.SIGSTOP)
    return bytes_of("VmRSS") + bytes_of("(?:Private_Clean|Private_Dirty|Pss_Shmem)", child, "smaps_rollup")


def _put_behind(child: int) -> None:
    """Let this process, which watches the copy, run as soon as it wakes. It costs the copy time beside other programs,
    so it is not done before."""
    behind = os.getpriority(os.PRIO_PROCESS, 0) + _BEHIND
    for thread in os.listdir(f"/proc/{child}/task"):
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(thread), behind)


def bytes_of(name: str, process: int | str = "self", file: str = "status") -> int:
    """Bytes in /proc/<process>/<file> , summed over names that match a regular expression; 0 if the process ended."""
    try:
        text = Path(f"/proc/{process}/{file}").read_text()
    except ProcessLookupError:
        return 0
    return sum(map(int, re.findall(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE))) * 1024


def forget_peak() -> None:
    """Reset ``VmHWM`` , the peak of the resident size."""
    Path("/proc/self/clear_refs").write_text("5")


def _state_and_work(process: int) -> tuple[str, float]:
    """The letter of the process's state, and its seconds on the CPU."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
