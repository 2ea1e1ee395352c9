"""Measured memory of runs whose memory is known, in copies of a new process, which has no other memory to free."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest

from gaccum_ms.memory import child
from gaccum_ms.memory.child import run_in_child
from tests.support.alone import alone

MB = 1_000_000


def taken(run: Callable[[], Any], room: int = 1 << 40) -> tuple[int, int]:
    """By how many bytes a run grows at its peak, which may have `room` ; and how many it copies."""
    before = psutil.Process().memory_info().rss
    peak, copied = run_in_child("a test", before + room, run)
    return peak - before, copied


def error_of(run: Callable[[], Any], room: int = 1 << 40) -> str:
    try:
        taken(run, room)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def take(blocks: int, size: int, seconds: float = 0.0) -> list[np.ndarray]:
    """Take memory, and wait so long after each block."""
    blocks_taken = []
    for _ in range(blocks):
        blocks_taken.append(np.ones(size, np.uint8))
        time.sleep(seconds)
    return blocks_taken


def stuck(copies: int) -> str:
    """The error of a run that waits for ever in the first copies. Each copy notes that it has started."""
    with tempfile.NamedTemporaryFile("a") as started, mock.patch.object(child, "_STUCK_AFTER", 1):

        def run() -> None:
            started.write("x")
            started.flush()
            if Path(started.name).stat().st_size <= copies:
                threading.Event().wait()

        return error_of(run)


def measurements() -> dict[str, Any]:
    array = np.ones(200 * MB, np.uint8)
    kept: list[Any] = []
    results = {
        "nothing": taken(lambda: None),
        "reads": taken(lambda: array.sum()),
        "frees": taken(lambda: take(3, 100 * MB)),
        "keeps": taken(lambda: kept.extend(take(3, 100 * MB))),
        "writes": taken(lambda: array.fill(2)),
        "error": error_of(lambda: 1 / 0),
        "killed": error_of(lambda: os.kill(os.getpid(), signal.SIGKILL)),
        "left": error_of(lambda: os._exit(3)),
        "too much at once": error_of(lambda: take(1, 1000 * MB, 10), 500 * MB),
        "stuck once": stuck(1),
        "stuck for ever": stuck(2),
    }
    assert (array == 1).all()
    assert not kept
    return results


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return alone(measurements)


@pytest.mark.parametrize(
    ("run", "peak", "copied"),
    [("nothing", 0, 0), ("reads", 0, 0), ("frees", 300, 0), ("keeps", 300, 0), ("writes", 0, 200)],
)
def test_growth_is_measured_and_what_both_processes_would_have_twice(run, peak, copied, measured):
    """A copy also writes Python's objects, to refer to them, and a run is said to read 24 MB of code."""
    for size, expected in zip(measured[run], (peak, copied), strict=True):
        assert expected <= size / MB + 1 <= expected + 50


def test_a_copy_that_waits_for_a_thread_that_it_lacks_is_replaced(measured):
    """Once; a second copy's error is raised."""
    assert measured["stuck once"] == "none"
    said = "has none of its other threads, but got a copy that waits for something for 1 s"
    assert said in measured["stuck for ever"]


def test_errors_come_back_as_they_are(measured):
    assert measured["error"] == "ZeroDivisionError: division by zero"
    assert measured["killed"].startswith("MemoryError: For 'a test', the system ended a trial")
    assert "exit code 3" in measured["left"]
    assert measured["too much at once"].startswith("MemoryError: For 'a test', a trial reached")


def reached() -> int:
    """How many bytes both processes had when a run was ended that takes 1 GB, a MB every 4 ms, and may have 600 MB."""
    before = psutil.Process().memory_info().rss
    words = error_of(lambda: take(1000, MB, 0.004), 600 * MB).split()
    return int(words[words.index("reached") + 1]) - before


def test_a_run_ends_before_it_has_too_much():
    """Before, not after: it is ended while it could not pass the limit before the next look."""
    assert 400 * MB < alone(reached) <= 600 * MB


def test_a_worker_that_may_have_no_children_is_told():
    with multiprocessing.get_context("fork").Pool(1) as pool, pytest.raises(RuntimeError, match="ProcessPoolExecutor"):
        pool.apply(child.check_system, ("a test",))
