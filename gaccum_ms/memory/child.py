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
import multiprocessing
import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import mindspore as ms
import psutil

from gaccum_ms.backend import fork_utils

_STUCK_AFTER = 20  # seconds without any work
_LOOKS_EVERY = 0.001  # seconds between two looks at the copy
_CODE = 24_000_000  # bytes: pages of code that a first training reads, more than a process has that has not trained
_CLEAR_REFS = Path("/proc/self/clear_refs")  # 5, written into it, resets the peak of the resident size


def check_system(owner: str) -> None:
    """Refuse what is not Linux, sandboxes that do not report the peak of a process, and workers without children."""
    if multiprocessing.current_process().daemon:
        raise RuntimeError(
            f"For '{owner}', a trial runs in a copy of this process, but got a daemon of multiprocessing, such as a "
            f"worker of its Pool, which may have no children. Use concurrent.futures.ProcessPoolExecutor."
        )
    if not os.access(_CLEAR_REFS, os.W_OK):
        raise RuntimeError(
            f"For '{owner}', memory on CPU is measured by the peak of a process's resident size, which needs "
            f"{_CLEAR_REFS} of Linux, but got a system without it. Measure outside of this sandbox, or on an "
            f"accelerator."
        )


def run_in_child(owner: str, limit: int, run: Callable[[], Any]) -> tuple[int, int]:
    """Run a function in a copy of this process; its result is lost. Returns the bytes that this process would need at
    its peak, and how many more it and a copy need. Raises the function's error; MemoryError if both processes would
    have exceeded the limit, or the system has ended the copy; TimeoutError if two copies, one after the other, do
    nothing for 20 seconds."""
    try:
        return _run_in_copy(owner, limit, run)
    except TimeoutError:
        return _run_in_copy(owner, limit, run)


def _run_in_copy(owner: str, limit: int, run: Callable[[], Any]) -> tuple[int, int]:
    gc.collect()
    own_size = psutil.Process().memory_info().rss
    fork = multiprocessing.get_context("fork")
    answers, answer = fork.Pipe(duplex=False)
    copy = fork.Process(target=_answer, args=(answer, run))
    fork_utils.prepare_before_fork()
    copy.start()
    try:
        fork_utils.parent_at_fork()
        answer.close()
        succeeded, value = _watched(owner, limit, answers, psutil.Process(copy.pid))
    except EOFError:
        copy.join()
        if copy.exitcode == -signal.SIGKILL:
            raise MemoryError(f"For '{owner}', the system ended a trial, as it does when memory runs out.") from None
        raise RuntimeError(
            f"For '{owner}', a trial must run in a copy of this process, but got one that ended with exit code "
            f"{copy.exitcode}. Search in a program's beginning, before it starts threads of its own."
        ) from None
    finally:
        copy.kill()
        copy.join()
        answers.close()
    if not succeeded:
        raise value
    peak, copied = value
    return own_size + _CODE + peak, copied


def _watched(owner: str, limit: int, answers: Connection, copy: psutil.Process) -> tuple[bool, Any]:
    """The copy's answer; EOFError if it ends without one. To read the memory of both processes takes Linux some 10 ms,
    so the copy's own is read instead until it has taken half of what was free."""
    this, work, worked_at = psutil.Process(), 0.0, time.monotonic()
    size = reads_at = free = 0  # bytes: of the copy; its size at which both are read again; left for both
    while not answers.poll(_LOOKS_EVERY):
        before, size = size, _anonymous(copy.memory_info())
        free -= size - before
        if size >= reads_at:
            free = limit - this.memory_info().rss - copy.memory_full_info().uss
            reads_at = size + free // 2
        if free < (size - before if before else 0):  # it could take the rest until the next look
            raise MemoryError(f"For '{owner}', a trial reached {limit - free} bytes, but may have {limit}.")
        if (seconds := sum(copy.cpu_times()[:2])) > work:
            work, worked_at = seconds, time.monotonic()
        elif time.monotonic() - worked_at > _STUCK_AFTER:
            raise TimeoutError(
                f"For '{owner}', a trial runs in a copy of this process, which has none of its other threads, but got "
                f"a copy that waits for something for {_STUCK_AFTER} s. Search in a program's beginning, before it "
                f"starts threads and iterates over data sets."
            )
    return answers.recv()


def _anonymous(memory: Any) -> int:
    """Resident bytes that belong to no file. Pages of code do: a copy has none, and reads again what this process has
    read."""
    return memory.rss - memory.shared


# -- in the copy -------------------------------------------------------------------------------------------------------


def _answer(answer: Connection, run: Callable[[], Any]) -> None:
    """Send whether `run` succeeded, and what it needed, or its error."""
    gc.freeze()  # a collection would write into all objects, and so duplicate their pages
    fork_utils.prctl_set_pdeathsig(signal.SIGKILL)
    Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, the system ends the copy
    fork_utils.child_at_fork()
    if ms.get_context("mode") == ms.PYNATIVE_MODE:  # drops graphs that `mindspore.jit` compiled for the parent
        ms.ms_memory_recycle()
    warnings.simplefilter("ignore")  # the real training warns
    try:
        answer.send((True, _measured(run)))
    except BaseException as error:
        answer.send((False, _sendable(error)))


def _sendable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))  # some errors can be written but not read
    except Exception:
        kind = MemoryError if isinstance(error, MemoryError) else RuntimeError
        return kind(f"{type(error).__name__}: {error}")
    return error


def _measured(run: Callable[[], Any]) -> tuple[int, int]:
    """The bytes by which the copy grew at its peak, and those that it had shared before."""
    import resource  # Windows has none

    copy = psutil.Process()
    before = _anonymous(copy.memory_info())
    _CLEAR_REFS.write_text("5")
    run()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    shared = sum(part.shared_dirty for part in copy.memory_maps())
    return peak - copy.memory_info().shared - before, max(0, before - shared)
