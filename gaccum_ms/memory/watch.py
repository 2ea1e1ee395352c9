"""Watches the copy of this process in which a trial runs (child.py), and ends it before both exceed the memory limit.

Linux reports the memory of both together, but slowly. So it is read again only when the copy has grown by half of the
remaining room. It is ended if the remaining room could be used up before the next reading.

On an idle machine this process looks on time. Near the limit, the copy then runs in short turns, and is stopped for
each look. On a busy machine this process has to wait for a core, and looks late. Two things keep the limit there. The
copy stops itself after a while (turns.py). And closer to the limit both processes run on one core: while this one waits
for it, the copy waits too. The copy runs in no turns there, which could end before it gets the core. It runs until it
stops itself, and can take more between two looks; so twice as many bytes are kept free.
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
_LATE = 0.01  # seconds: after a look that is later by more than this, the machine is busy
_STARVED = 400  # turns without any work: other programs have the cores, and the machine is busy too
_CLOSE = 100_000_000  # bytes of room: on a busy machine, both run on one core within this
_NOTHING = 1_000_000  # bytes that are not worth another reading
_STUCK_AFTER = 20  # seconds without any work


class TooMuchMemory(MemoryError):
    """The copy was ended because both processes would have exceeded the limit, or by the system.

    Args:
        message (str): The message.
        reached (int): Resident bytes of the copy; the limit if the system has ended it.
    """

    def __init__(self, message: str, reached: int) -> None:
        super().__init__(message)
        self.reached = reached


class StuckError(RuntimeError):
    """The copy was ended because it waited for something that only another thread of this process could do."""


class Watch:
    """Watches the copies of a search, one after the other.

    Args:
        owner (str): The name in errors.
        limit (int): The limit of this process and a copy together, in bytes.
    """

    def __init__(self, owner: str, limit: int) -> None:
        self.owner = owner
        self.limit = limit
        # Whether more programs run than there are cores. Later also: whether a look came late, or a copy got no core.
        self._busy = os.getloadavg()[0] > (os.cpu_count() or 1)

    def read_answer(self, pipe: Any, child: int, at_once: int) -> bytes:
        """What a copy writes into a pipe until it closes it.

        Args:
            pipe (file): The pipe's end for reading.
            child (int): The copy's process id.
            at_once (int): Bytes of the largest tensor that it writes at memory's speed.

        Raises:
            TooMuchMemory: If the limit would be exceeded.
            StuckError: If the copy does nothing for 20 seconds.
        """
        cores = os.sched_getaffinity(0)
        try:
            return self._answer(pipe, child, _BETWEEN_LOOKS + at_once)
        finally:
            os.sched_setaffinity(0, cores)

    def _answer(self, pipe: Any, child: int, between: int) -> bytes:
        """`between` : bytes that the copy may take between two looks."""
        text = b""
        looks_at, in_turns, on_one_core = 0, False, False
        worked, at, turns = 0.0, time.monotonic(), 0
        while True:
            waits, began = _TURN if in_turns else _LOOKS_EVERY, time.monotonic()
            if select.select([pipe], [], [], waits)[0]:
                more = os.read(pipe.fileno(), 1 << 16)
                text += more
                if not more:
                    return text
            late = time.monotonic() - began > waits + _LATE
            if not self._busy and (late or turns > _STARVED):
                self._busy = True
                looks_at, in_turns = 0, False  # both are read again, with the whole reserve
            if in_turns:
                turns += 1
                os.kill(child, signal.SIGSTOP)
            size = sizes_in(f"/proc/{child}/status")["VmRSS"]
            if size > looks_at:
                kept_free = between // 2 if in_turns else 2 * between if self._busy else between
                room = self.limit - _together(child) - kept_free
                if room < _NOTHING and not self._busy and not in_turns:
                    in_turns = True
                    room += between - between // 2
                if room < _NOTHING:
                    raise TooMuchMemory(
                        f"For '{self.owner}', a trial reached {self.limit - room} bytes, but may have {self.limit}.",
                        size,
                    )
                if room < _CLOSE and self._busy and not on_one_core:
                    on_one_core = True
                    _run_on_one_core(child)
                looks_at = size + room // 2
            state, work = _state_and_work(child)
            if state == "T":  # stopped, by itself or here
                os.kill(child, signal.SIGCONT)
            if work > worked:
                worked, at, turns = work, time.monotonic(), 0
            elif time.monotonic() - at > _STUCK_AFTER:
                raise StuckError(
                    f"For '{self.owner}', a trial runs in a copy of this process, which has none of its other threads, "
                    f"but got a copy that waits for something for {_STUCK_AFTER} s. Search in a program's beginning, "
                    f"before it starts threads and iterates over data sets."
                )


def _together(child: int) -> int:
    """Bytes of this process and the copy together, with shared memory counted once. The copy is stopped."""
    os.kill(child, signal.SIGSTOP)
    sizes = sizes_in(f"/proc/{child}/smaps_rollup")
    return own("VmRSS") + sum(sizes[name] for name in ("Private_Clean", "Private_Dirty", "Pss_Shmem"))


def _run_on_one_core(child: int) -> None:
    """Bind this thread, and all threads of the copy, to the core on which this thread runs."""
    core = int(_fields_of_stat("thread-self")[36])
    os.sched_setaffinity(0, {core})
    for thread in os.listdir(f"/proc/{child}/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), {core})


def _state_and_work(process: int) -> tuple[str, float]:
    """The letter of the process's state, and its seconds on the CPU."""
    fields = _fields_of_stat(str(process))
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _fields_of_stat(process: str) -> list[str]:
    """The fields from the third on, which is the state; before it is the name, which may have spaces."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
