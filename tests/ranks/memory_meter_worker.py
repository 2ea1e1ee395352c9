"""Runs in copies of this process: their peak memory, their remains, and their failures. Run by
tests/memory/test_meter.py."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import mindspore as ms
import numpy as np
from memory_limit_worker import Watch as MemoryThread
from mindspore import Tensor
from support.two_ranks import Results, leave

from gaccum_ms.memory import child, watch
from gaccum_ms.memory.meter import ProcessMeter
from gaccum_ms.memory.proc import own
from gaccum_ms.memory.watch import TooMuchMemory, Watch

MB = 1_000_000
PLENTY = 1 << 40


def usage(run, written=(), limit=PLENTY) -> child.Usage:
    return child.run_in_child(Watch("a test", limit), run, written)


def blocks(size: int) -> None:
    held = [np.ones(size, np.uint8) for _ in range(100 * MB // size)]
    time.sleep(0.1)
    del held


def error_of(run) -> str:
    try:
        usage(run)
    except TooMuchMemory:
        return "TooMuchMemory"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def fail() -> None:
    raise ValueError("as it is")


def take(blocks: int, size: int, waits: bool = True) -> None:
    """Take memory; after each block, it may wait until it was looked at."""
    held = []
    for _ in range(blocks):
        held.append(np.ones(size, np.uint8))
        if waits:
            os.kill(os.getpid(), signal.SIGSTOP)


a_gigabyte = partial(take, 1000, MB)


def too_much(run) -> Results:
    """What a run had reached when it was ended, with a limit of 130 MB above the memory that this process has."""
    try:
        child.run_in_child(watch_of(130 * MB), run, ())
    except TooMuchMemory as error:
        return {"too_much": np.array(str(error)), "reached": np.array(error.reached - own("VmRSS"))}
    return {"too_much": np.array("nothing"), "reached": np.array(1000 * MB)}


def watch_of(room: int) -> Watch:
    """A copy may take so many bytes."""
    return Watch("a test", own("VmRSS") + room)


def looked_at_rarely() -> Results:
    """As if this process had to wait for a core. Then the same for a run that does not stop itself."""
    at_full_speed = partial(a_gigabyte, waits=False)
    with mock.patch.object(watch, "_LOOKS_EVERY", 0.3):
        results = {"rarely": too_much(at_full_speed)["reached"]}
    # The control has time enough to take all of it, on a busy machine too.
    with mock.patch.object(watch, "_LOOKS_EVERY", 30), mock.patch.object(child, "in_turns", nullcontext):
        return {**results, "rarely_without_turns": too_much(at_full_speed)["reached"]}


def cores_after(blocks: int) -> None:
    """Take memory, in blocks of 1 MB, and then say in an error on how many cores this process's threads may run."""
    ended = threading.Event()
    other = threading.Thread(target=ended.wait, daemon=True)
    other.start()
    take(blocks, MB)
    cores = set().union(*(os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")))
    ended.set()
    raise ValueError(len(cores))


def cores_of(blocks: int) -> int:
    try:
        child.run_in_child(watch_of(200 * MB), partial(cores_after, blocks), ())
    except ValueError as error:
        return int(str(error))
    return 0


def busy_and_idle() -> Results:
    """As if all looks came late, as if the machine's load were high, and neither. Turns are long, so that a run gets a
    core in each."""
    cores = os.sched_getaffinity(0)
    results = {"cores": np.array(len(cores))}
    for name, late, load in (("busy", -1, 0), ("loaded", 1000, 1000), ("idle", 1000, 0)):
        loads = mock.patch.object(os, "getloadavg", lambda load=load: (load, 0, 0))
        with loads, mock.patch.multiple(watch, _LATE=late, _TURN=0.02):
            results |= {
                f"{name}_reached": too_much(a_gigabyte)["reached"],
                f"{name}_cores_far": np.array(cores_of(5)),
                f"{name}_cores_close": np.array(cores_of(150)),
            }
    return {**results, "own_cores_again": np.array(os.sched_getaffinity(0) == cores)}


def written() -> Results:
    weight = ms.Parameter(Tensor(np.ones(100 * MB // 4, np.float32)))
    weight.asnumpy()

    before = own("VmRSS")
    memory = MemoryThread()
    peak = usage(lambda: weight.asnumpy().fill(2.0) or time.sleep(0.3), [weight]).peak
    return {
        "written_together": np.array(memory.most - before),
        "written_peak": np.array(peak - before),
        "weight_unchanged": np.array((weight.asnumpy() == 1).all()),
    }


def stuck(copies: int, started: Path) -> str:
    """The error of a run that waits for ever in the first copies. Each copy notes that it has started."""

    def run() -> None:
        with started.open("a") as file:
            file.write("x")
        if started.stat().st_size <= copies:
            threading.Event().wait()

    with mock.patch.object(watch, "_STUCK_AFTER", 1):
        return error_of(run)


def main(out: Path) -> None:
    ProcessMeter()
    results = written()
    nothing = usage(lambda: None).peak
    before = own("VmRSS")
    for size in (64 * 1024, 25 * MB):
        results[f"peak_{size}"] = np.array(usage(lambda size=size: blocks(size)).peak - nothing)
    results |= too_much(a_gigabyte)
    results |= {
        "error": np.array(error_of(fail)),
        "killed": np.array(error_of(lambda: os.kill(os.getpid(), signal.SIGKILL))),
        "left": np.array(error_of(lambda: os._exit(3))),
        **{f"stuck_{copies}": np.array(stuck(copies, out / f"stuck.{copies}")) for copies in (1, 3)},
        "grown": np.array(own("VmRSS") - before),
    }
    results |= looked_at_rarely() | busy_and_idle()
    leave(out, 0, results)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
