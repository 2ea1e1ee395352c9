"""Measured memory of runs whose memory is known, and limits of containers, from files in the kernel's format."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from gaccum_ms.memory import child, watch
from gaccum_ms.memory.child import run_in_child
from gaccum_ms.memory.meter import ProcessMeter, container_limits, device_memory_free
from gaccum_ms.memory.proc import own, sizes_in
from gaccum_ms.memory.watch import Watch
from tests.support.alone import alone
from tests.support.no_device import compiler

MB = 1_000_000


# -- in a new process, which has no other memory to free ---------------------------------------------------------------


def peak(run: Callable[[], Any], written: tuple = (), room: int = 1 << 40) -> int:
    """The peak of a run in a copy, which may have so many bytes more than this process."""
    return run_in_child(Watch("a test", own("VmRSS") + room), run, written).peak


def error_of(run: Callable[[], Any], *arguments: Any) -> str:
    try:
        peak(run, *arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def take(blocks: int, size: int, seconds: float = 0.0) -> None:
    """Take memory, and wait so long after each block."""
    taken = []
    for _ in range(blocks):
        taken.append(np.ones(size, np.uint8))
        time.sleep(seconds)


def fail() -> None:
    raise ValueError("as it is")


def bytes_of_its_own(written: bool) -> int:
    """The memory that a copy does not share after it has written a weight of 100 MB."""
    weight = ms.Parameter(Tensor(np.ones(100 * MB // 4, np.float32)))
    weight.asnumpy()

    def run() -> None:
        weight.asnumpy().fill(2.0)
        raise ValueError(sizes_in("/proc/self/smaps_rollup")["Private_Dirty"])

    private = error_of(run, (weight,) if written else ())
    assert (weight.asnumpy() == 1).all()
    return int(private.removeprefix("ValueError: "))


def stuck(copies: int, started: Path) -> str:
    """The error of a run that waits for ever in the first copies. Each copy notes that it has started."""

    def run() -> None:
        with started.open("a") as file:
            file.write("x")
        if started.stat().st_size <= copies:
            threading.Event().wait()

    with mock.patch.object(watch, "_STUCK_AFTER", 1):
        return error_of(run)


def reached(reading: float = 0.0) -> tuple[str, int]:
    """The error of a run that takes 1 GB, a MB every 4 ms, and may have 600 MB; and how many bytes it has taken. It is
    looked at five times a second, so that a look that is late on a busy machine changes little. To read the memory of
    both takes at least so many seconds. A copy that repeats a weight of 300 MB, slowly, seems to lose these."""
    weight = ms.Parameter(Tensor(np.ones(300 * MB // 4, np.float32)))
    weight.asnumpy()
    before, together, repeat = own("VmRSS"), watch._together, child._repeat

    def read_slowly(process: int) -> int:
        size = together(process)
        time.sleep(reading)
        return size

    def repeat_slowly(parameter: ms.Parameter) -> None:
        time.sleep(0.5)
        repeat(parameter)

    looks = mock.patch.multiple(watch, _LOOKS_EVERY=0.2, _together=read_slowly)
    with looks, mock.patch.object(child, "_repeat", repeat_slowly):
        try:
            peak(lambda: weight.asnumpy().max() and take(1000, MB, 0.004), (weight,), room=600 * MB)
        except watch.TooMuchMemory as error:
            return str(error), error.reached - before
    return "none", 1000 * MB


def measure() -> dict[str, Any]:
    ProcessMeter()
    nothing = peak(lambda: None)
    before = own("VmRSS")
    return {
        "peaks": [peak(lambda size=size: take(100 * MB // size, size)) - nothing for size in (64 * 1024, 25 * MB)],
        "reached": reached(),
        "error": error_of(fail),
        "killed": error_of(lambda: os.kill(os.getpid(), signal.SIGKILL)),
        "left": error_of(lambda: os._exit(3)),
        "grown": own("VmRSS") - before,
    }


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return alone(measure)


def test_measures_what_a_run_reaches_and_leaves_nothing(measured):
    """100 MB, in blocks that the process keeps when they are freed, and in blocks that it returns."""
    assert measured["peaks"] == pytest.approx([100 * MB, 100 * MB], rel=0.1)
    assert measured["grown"] < 5 * MB


@pytest.mark.thorough
def test_large_parameters_that_a_run_writes_do_not_count_twice():
    """Those that the copy knows of; the control knows of none."""
    assert alone(bytes_of_its_own, True) < 50 * MB
    assert alone(bytes_of_its_own, False) > 100 * MB


def test_a_run_that_would_have_too_much_is_ended(measured):
    assert "may have" in measured["reached"][0]


@pytest.mark.idle
@pytest.mark.thorough
def test_a_run_ends_before_it_has_too_much(measured):
    """Before, not after: it is ended while it could not pass the limit before the next look."""
    assert measured["reached"][1] < 550 * MB


@pytest.mark.idle
@pytest.mark.thorough
def test_what_a_run_takes_between_two_readings_counts():
    """It would take half of what is free during a third reading."""
    message, _ = alone(reached, 1.0)
    assert "may have" in message


def test_errors_come_back_as_they_are(measured):
    assert measured["error"] == "ValueError: as it is"
    assert measured["killed"].startswith("TooMuchMemory: For 'a test', the system ended a trial")
    assert "exit code 3" in measured["left"]


@pytest.mark.thorough
def test_a_copy_that_waits_for_a_thread_that_it_lacks_is_replaced(tmp_path):
    """Twice; a third copy's error is raised."""
    assert alone(stuck, 1, tmp_path / "once") == "none"
    said = alone(stuck, 3, tmp_path / "for ever")
    assert "has none of its other threads, but got a copy that waits for something for 1 s" in said


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_limit_is_at_least_what_the_process_holds():
    assert own("VmRSS") < ProcessMeter().limit()


def test_says_what_is_missing_where_the_system_does_not_tell(monkeypatch):
    def refuse() -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("gaccum_ms.memory.meter.forget_peak", refuse)
    with pytest.raises(RuntimeError, match=r"needs /proc/self/clear_refs.*but got .*Permission denied"):
        ProcessMeter()


# -- accelerators, simulated -------------------------------------------------------------------------------------------


@pytest.fixture
def driver(tmp_path):
    """A library in place of a vendor's runtime: 5,000 bytes free on device 3, an error on all other devices."""
    source = """
    #include <stddef.h>
    static int device = -1;
    int %s(int number) { device = number; return 0; }
    int %s(%s size_t *free, size_t *total) { *free = 5000; *total = 9000; return device == 3 ? 0 : 100; }
    """

    def make(name, *names):
        (tmp_path / "driver.c").write_text(source % names)
        subprocess.run([compiler(), "-shared", "-fPIC", "-o", tmp_path / name, tmp_path / "driver.c"], check=True)
        lines = [f"7f00-7f01 r-xp 0 00:00 1   {path}" for path in ("/usr/lib/libc.so.6", tmp_path / name)]
        (tmp_path / "maps").write_text("\n".join(lines))
        return tmp_path / "maps"

    return make


@pytest.mark.skipif(compiler() is None, reason="there is no C compiler to make a runtime with")
@pytest.mark.parametrize(
    ("name", "functions"),
    [
        ("libcudart.so.11.0", ("cudaSetDevice", "cudaMemGetInfo", "")),
        ("libascendcl.so", ("aclrtSetDevice", "aclrtGetMemInfo", "int kind,")),
    ],
)
def test_free_memory_by_the_vendors_runtime(driver, name, functions):
    maps = driver(name, *functions)
    assert device_memory_free(3, maps) == 5000
    with pytest.raises(RuntimeError, match=r"free memory of device 1, but got error 100.* Give 'memory_limit'"):
        device_memory_free(1, maps)


def test_says_that_there_is_no_runtime(tmp_path):
    (tmp_path / "maps").write_text("7f00-7f01 r-xp 0 00:00 1   /usr/lib/libc.so.6")
    with pytest.raises(RuntimeError, match=r"a process without any of .*libascendcl.* Give 'memory_limit'"):
        device_memory_free(0, tmp_path / "maps")


HUGE = "9223372036854771712\n"  # version 1 writes it for no limit


@pytest.mark.parametrize(
    ("group", "files", "limits"),
    [
        ("0::/a/b\n", {"a/memory.max": "3000\n", "a/b/memory.max": "max\n"}, [3000]),
        ("0::/\n", {"memory.max": "500\n"}, [500]),
        (
            "9:name=systemd:/\n4:cpu,memory:/x\n0::/\n",
            {"memory/x/memory.limit_in_bytes": "700\n", "memory/memory.limit_in_bytes": HUGE},
            [700],
        ),
        ("0::/\n", {}, []),
        (None, {}, []),
    ],
    ids=["version 2", "version 2 in a container", "version 1", "no limit", "no groups"],
)
def test_limits_of_containers(group, files, limits, tmp_path):
    """In a container of version 2, the process's group looks like the root, whose file has the limit."""
    texts = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in (texts | ({} if group is None else {"proc/self/cgroup": group})).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert container_limits(tmp_path) == limits
