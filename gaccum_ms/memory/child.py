"""Runs a function in a copy of this process (``fork`` ), which watch.py ends before both exceed a memory limit.

Nothing that the copy writes affects this process: weights, statistics, generators, Python's objects, and MindSpore's
graphs. Both share all memory that neither has written since, so that together they use little more than the copy would
alone. There are two exceptions, which are handled here:

* Resident size counts pages of files, mostly code, in the process that has read them. So the copy first reads the
  pages that this process has read.
* An optimizer writes all weights and its state, which would duplicate these pages. So in the copy, all addresses of a
  large Parameter are mapped to repetitions of its first part: the addresses and the resident size are the same, but it
  needs little memory. The results of such weights are wrong, but nothing uses them.

A copy has none of the other threads. If one of them holds a lock at the moment of the copy, the copy waits for it for
ever. That is rare, so the run is then tried in another copy.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np

from gaccum_ms.backend import fork_utils
from gaccum_ms.memory.proc import forget_peak, own
from gaccum_ms.memory.watch import StuckError, TooMuchMemory, Watch

_PAGE = mmap.PAGESIZE
_REPEATED = 128 * 1024  # bytes: the smallest Parameter that is repeated
_PARTS = 16  # the largest number of repetitions
_PART = 64 * 1024  # bytes: the smallest repeated part
_COPIES = 3  # one after the other, if they wait for something
_BEGUN = b"0"  # no pickle begins with it


class Usage(NamedTuple):
    """Bytes of the copy, including memory that it shares with this process."""

    peak: int  # during the run
    after: int  # after the run


def run_in_child(watch: Watch, run: Callable[[], Any], written: Iterable[ms.Parameter]) -> Usage:
    """Run a function in a copy of this process. `written` : the Parameters that the function writes, see the head of
    this file; its result is lost. Raises its error, or TooMuchMemory; StuckError if three copies do nothing for 20
    seconds each."""
    written = list(written)
    for _ in range(_COPIES - 1):
        with suppress(StuckError):
            return _run_in_copy(watch, run, written)
    return _run_in_copy(watch, run, written)


def _run_in_copy(watch: Watch, run: Callable[[], Any], written: list[ms.Parameter]) -> Usage:
    pages = _file_pages()
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    answers, answer = os.pipe()
    fork_utils.prepare_before_fork()
    child = os.fork()
    if child == 0:
        _answer(answer, lambda: _measured(run, written, pages, answer))
    ended = False
    try:
        fork_utils.parent_at_fork()
        os.close(answer)
        with os.fdopen(answers, "rb") as pipe:
            text = watch.read_answer(pipe, child).removeprefix(_BEGUN)
        ended = True
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if status == -signal.SIGKILL:
        raise TooMuchMemory(
            f"For '{watch.owner}', the system ended a trial, as it does when memory runs out.", watch.limit
        )
    if not text:
        raise RuntimeError(
            f"For '{watch.owner}', a trial must run in a copy of this process, but got one that ended with exit code "
            f"{status}. Search in a program's beginning, before it starts threads of its own."
        )
    succeeded, value = pickle.loads(text)
    if not succeeded:
        raise value
    return value


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


def _measured(
    run: Callable[[], Any], written: Iterable[ms.Parameter], pages: list[tuple[int, int, np.ndarray]], pipe: int
) -> Usage:
    for start, length, places in pages:
        np.frombuffer((ctypes.c_char * length).from_address(start), np.uint8)[places].max()
    for parameter in written:
        _repeat(parameter)
    forget_peak()
    os.write(pipe, _BEGUN)  # from here on, it is watched
    run()
    return Usage(own("VmHWM"), own("VmRSS"))


def _repeat(parameter: ms.Parameter) -> None:
    """Map a Parameter's addresses to repetitions of its first part."""
    if parameter.nbytes < _REPEATED or parameter.has_init or not parameter.data_ptr():
        return
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (*(ctypes.c_void_p, ctypes.c_size_t), *[ctypes.c_int] * 3, ctypes.c_long)
    map_fixed = 0x10
    first = -(-parameter.data_ptr() // _PAGE) * _PAGE
    last = (parameter.data_ptr() + parameter.nbytes) // _PAGE * _PAGE
    part = -(-max(_PART, parameter.nbytes // _PARTS) // _PAGE) * _PAGE
    file = os.memfd_create("gaccum_ms")
    os.write(file, ctypes.string_at(first, min(part, last - first)))
    for place in range(first, last, part):
        length = min(part, last - place)
        library.mmap(place, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | map_fixed, file, 0)
    os.close(file)


# -- in this process ---------------------------------------------------------------------------------------------------


def _file_pages() -> list[tuple[int, int, np.ndarray]]:
    """The resident pages of files: for each range its start, its length, and the pages' offsets in it."""
    maps = []
    with open("/proc/self/pagemap", "rb", buffering=0) as entries:
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, permissions, _, _, _, *name = line.split(maxsplit=5)
            if not name or not name[0].startswith("/") or name[0].startswith("/dev/") or permissions[0] != "r":
                continue
            start, end = (int(address, 16) for address in addresses.split("-"))
            entries.seek(start // _PAGE * 8)
            bits = np.frombuffer(entries.read((end - start) // _PAGE * 8), np.uint64)
            present_and_of_file = (bits >> 63) & (bits >> 61) & 1
            places = np.flatnonzero(present_and_of_file) * _PAGE
            if places.size:
                maps.append((start, end - start, places))
    return maps
