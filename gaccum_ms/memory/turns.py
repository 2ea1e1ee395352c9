"""Lets a trial's process stop itself, so that it cannot grow unwatched.

The process that watches a trial may have to wait for a core while the trial goes on: on a shared host for a tenth of a
second, in which a trial can take hundreds of megabytes. So the trial stops itself each time it has used the CPU for
some milliseconds, and the watcher continues it.
"""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_TURN = 6_000_000  # nanoseconds on the CPU, of all threads together. Linux looks at this clock every 1 to 10 ms
_CLOCK_PROCESS_CPUTIME_ID = 2


class _Event(ctypes.Structure):
    """``struct sigevent`` : the signal of a timer."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 48),
    )


class _Times(ctypes.Structure):
    """``struct itimerspec`` : the time between two signals, and to the first."""

    _fields_ = (
        ("every_seconds", ctypes.c_long),
        ("every_nanoseconds", ctypes.c_long),
        ("first_seconds", ctypes.c_long),
        ("first_nanoseconds", ctypes.c_long),
    )


@contextmanager
def in_turns() -> Iterator[None]:
    """Within it, this process stops itself after each turn; where a system has no such timers, it does not.

    The clock stands still in a stopped process. Otherwise a second signal could wait there, and the signal to continue
    would discard it, and with it the timer.
    """
    timer = ctypes.c_void_p()
    try:
        library = ctypes.CDLL("librt.so.1")
        has_timer = not library.timer_create(
            _CLOCK_PROCESS_CPUTIME_ID, ctypes.byref(_Event(signal=signal.SIGSTOP)), ctypes.byref(timer)
        )
    except (OSError, AttributeError):
        has_timer = False
    if has_timer:
        library.timer_settime(timer, 0, ctypes.byref(_Times(0, _TURN, 0, _TURN)), None)
    try:
        yield
    finally:
        if has_timer:
            library.timer_delete(timer)
