"""Runs a function in a copy of this process (``fork`` ), and reads the copy's peak memory.

Nothing that the copy writes affects this process: weights, statistics, generators, Python's objects, and MindSpore's
graphs. Both share all memory that neither has written since. So what the function would need in this process is what
this process has, and by how much the copy grew. Both together have some 30 MB more, of which the copy has written its
own. The copy is ended before both exceed the limit.

A copy has none of the other threads. If one of them holds a lock at the moment of the copy, the copy waits for it for
ever. That is rare, so the run is then tried in another copy.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms

from gaccum_ms.backend import fork_utils
from gaccum_ms.memory.proc import forget_peak, own, sizes_in

_COPIES = 3  # one after the other, if they wait for something
_STUCK_AFTER = 20  # seconds without any work
_LOOKS_EVERY = 0.001  # seconds between two looks at the copy
_CODE = 24_000_000  # bytes: pages of code that a first training reads, more than a process has that has not trained


class Usage(NamedTuple):
    """Bytes that a run would need in this process, and by how much more this process and a copy need."""

    peak: int  # during the run
    after: int  # after the run
    copied: int = 0


class TooMuchMemory(MemoryError):
    """The copy was ended because both processes would have exceeded the limit, or by the system. `reached` : their
    bytes; the limit if the system has ended it."""

    def __init__(self, message: str, reached: int) -> None:
        super().__init__(message)
        self.reached = reached


class StuckError(RuntimeError):
    """The copy was ended because it waited for something that only another thread of this process could do."""


def run_in_child(owner: str, limit: int, run: Callable[[], Any]) -> Usage:
    """Run a function in a copy of this process; its result is lost. Raises its error, or TooMuchMemory;
    StuckError if three copies do nothing for 20 seconds each."""
    for _ in range(_COPIES - 1):
        with suppress(StuckError):
            return _run_in_copy(owner, limit, run)
    return _run_in_copy(owner, limit, run)


def _run_in_copy(owner: str, limit: int, run: Callable[[], Any]) -> Usage:
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    own_size = own("VmRSS")
    answers, answer = os.pipe()
    fork_utils.prepare_before_fork()
    child = os.fork()
    if child == 0:
        _answer(answer, lambda: _measured(run))
    ended = False
    try:
        fork_utils.parent_at_fork()
        os.close(answer)
        with os.fdopen(answers, "rb") as pipe:
            text = _watched(owner, limit, pipe, child)
        ended = True
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if status == -signal.SIGKILL:
        raise TooMuchMemory(f"For '{owner}', the system ended a trial, as it does when memory runs out.", limit)
    if not text:
        raise RuntimeError(
            f"For '{owner}', a trial must run in a copy of this process, but got one that ended with exit code "
            f"{status}. Search in a program's beginning, before it starts threads of its own."
        )
    succeeded, value = pickle.loads(text)
    if not succeeded:
        raise value
    peak, after, copied = value
    return Usage(own_size + _CODE + peak, own_size + _CODE + after, copied)


def _watched(owner: str, limit: int, pipe: Any, child: int) -> bytes:
    """What a copy writes into a pipe until it closes it. Raises TooMuchMemory or StuckError. To read the memory of both
    processes takes Linux some 10 ms, so the copy's own is read instead until it has taken half of what was free."""
    text, work, worked_at = b"", 0.0, time.monotonic()
    size = reads_at = free = 0  # bytes: of the copy; its size at which both are read again; left for both
    while True:
        if select.select([pipe], [], [], _LOOKS_EVERY)[0]:
            more = os.read(pipe.fileno(), 1 << 16)
            if not more:
                return text
            text += more
        before, size = size, sizes_in(f"/proc/{child}/status")["RssAnon"]
        free -= size - before
        if size >= reads_at:
            free = limit - own("VmRSS") - _apart(sizes_in(f"/proc/{child}/smaps_rollup"))
            reads_at = size + free // 2
        if free < (size - before if before else 0):  # it could take the rest until the next look
            raise TooMuchMemory(
                f"For '{owner}', a trial reached {limit - free} bytes, but may have {limit}.", limit - free
            )
        if (seconds := _seconds_of_work(child)) > work:
            work, worked_at = seconds, time.monotonic()
        elif time.monotonic() - worked_at > _STUCK_AFTER:
            raise StuckError(
                f"For '{owner}', a trial runs in a copy of this process, which has none of its other threads, but got "
                f"a copy that waits for something for {_STUCK_AFTER} s. Search in a program's beginning, before it "
                f"starts threads and iterates over data sets."
            )


def _apart(sizes: dict[str, int]) -> int:
    """Bytes of a copy that it does not share."""
    return sizes["Rss"] - sizes["Shared_Clean"] - sizes["Shared_Dirty"]


def _seconds_of_work(process: int) -> float:
    """The process's seconds on the CPU."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()  # before it is the name
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- in the copy -------------------------------------------------------------------------------------------------------


def _answer(pipe: int, run: Callable[[], Any]) -> None:
    """Send the result or error of `run` , and end at once, without exit handlers and without flushing buffers."""
    text = b""
    gc.freeze()  # a collection would write into all objects, and so duplicate their pages
    try:
        fork_utils.prctl_set_pdeathsig(signal.SIGKILL)
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, the system ends the copy
        fork_utils.child_at_fork()
        if ms.get_context("mode") == ms.PYNATIVE_MODE:  # drops graphs that `mindspore.jit` compiled for the parent
            ms.ms_memory_recycle()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the real training warns
            try:
                text = pickle.dumps((True, run()))
            except BaseException as error:
                text = _pickled(error)
        with os.fdopen(pipe, "wb") as file:
            file.write(text)
    finally:
        os._exit(0 if text else 1)


def _pickled(error: BaseException) -> bytes:
    try:
        text = pickle.dumps((False, error))
        pickle.loads(text)  # some errors can be written but not read
    except Exception:
        kind = MemoryError if isinstance(error, MemoryError) else RuntimeError
        text = pickle.dumps((False, kind(f"{type(error).__name__}: {error}")))
    return text


def _measured(run: Callable[[], Any]) -> tuple[int, int, int]:
    """The bytes by which the copy grew, at its peak and after the run, and those that it had shared before. Pages of
    code are left out: a copy has none, and reads again what this process has read."""
    before = own("RssAnon")
    forget_peak()
    run()
    peak, after = own("VmHWM"), sizes_in("/proc/self/status")
    shared = sizes_in("/proc/self/smaps_rollup")["Shared_Dirty"]
    return peak - after["RssFile"] - before, after["RssAnon"] - before, max(0, before - shared)
