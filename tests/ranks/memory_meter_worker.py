"""Runs in copies of this process: their peak memory, their remains, and their failures. Run by
tests/memory/test_meter.py."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import mindspore as ms
import numpy as np
from memory_limit_worker import Watch
from mindspore import Tensor
from support.two_ranks import Results, leave

from gaccum_ms.memory import child
from gaccum_ms.memory.child import TooMuchMemory, bytes_of, run_in_child
from gaccum_ms.memory.meter import ProcessMeter

MB = 1_000_000
PLENTY = 1 << 40


def reached(run, written=(), limit=PLENTY) -> int:
    return run_in_child("a test", run, written, limit).peak


def blocks(size: int) -> None:
    held = [np.ones(size, np.uint8) for _ in range(100 * MB // size)]
    time.sleep(0.1)
    del held


def error_of(run) -> str:
    try:
        run_in_child("a test", run, (), PLENTY)
    except TooMuchMemory:
        return "TooMuchMemory"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def fail() -> None:
    raise ValueError("as it is")


def take_a_gigabyte(pause: float) -> None:
    held = []
    for _ in range(1000):
        held.append(np.ones(MB, np.uint8))
        time.sleep(pause)


def too_much(pause: float = 0.001) -> Results:
    limit = bytes_of("VmRSS") + 130 * MB
    try:
        run_in_child("a test", lambda: take_a_gigabyte(pause), (), limit)
    except TooMuchMemory as error:
        return {"too_much": np.array(str(error)), "reached": np.array(error.reached - bytes_of("VmRSS"))}
    return {"too_much": np.array("nothing"), "reached": np.array(1000 * MB)}


def looked_at_rarely() -> Results:
    """As if this process had to wait for a core. Then the same for a run that does not stop itself."""
    child._LOOKS_EVERY = 0.3
    results = {"rarely": too_much(0)["reached"]}
    child._LOOKS_EVERY = 30  # time enough to take all of it, on a busy machine too
    child.in_turns = nullcontext
    return {**results, "rarely_without_turns": too_much(0)["reached"]}


def written() -> Results:
    weight = ms.Parameter(Tensor(np.ones(100 * MB // 4, np.float32)))
    weight.asnumpy()

    before = bytes_of("VmRSS")
    watch = Watch()
    peak = reached(lambda: weight.asnumpy().fill(2.0) or time.sleep(0.3), [weight])
    return {
        "written_together": np.array(watch.most - before),
        "written_peak": np.array(peak - before),
        "weight_unchanged": np.array((weight.asnumpy() == 1).all()),
    }


def main(out: Path) -> None:
    ProcessMeter()
    results = written()
    nothing = reached(lambda: None)
    before = bytes_of("VmRSS")
    for size in (64 * 1024, 25 * MB):
        results[f"peak_{size}"] = np.array(reached(lambda size=size: blocks(size)) - nothing)
    results |= too_much()
    results |= {
        "error": np.array(error_of(fail)),
        "killed": np.array(error_of(lambda: os.kill(os.getpid(), signal.SIGKILL))),
        "left": np.array(error_of(lambda: os._exit(3))),
        "grown": np.array(bytes_of("VmRSS") - before),
    }
    results |= looked_at_rarely()
    leave(out, 0, results)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
