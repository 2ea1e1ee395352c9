"""Runs in copies of this process: their peak memory, their remains, and their failures. Run by
tests/memory/test_meter.py."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import mindspore as ms
import numpy as np
from memory_limit_worker import Watch
from mindspore import Tensor
from support.two_ranks import Results, leave

from gaccum_ms.memory import child, watch
from gaccum_ms.memory.meter import ProcessMeter
from gaccum_ms.memory.watch import TooMuchMemory, bytes_of

MB = 1_000_000
PLENTY = 1 << 40


def run_in_child(run, written=(), limit=PLENTY) -> child.Usage:
    return child.run_in_child(watch.Watch("a test", limit), run, written)


def blocks(size: int) -> None:
    held = [np.ones(size, np.uint8) for _ in range(100 * MB // size)]
    time.sleep(0.1)
    del held


def error_of(run) -> str:
    try:
        run_in_child(run)
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


def take_in_spurts() -> None:
    """45 MB at once, each 0.4 s."""
    held = []
    for _ in range(8):
        held.append(np.ones(45 * MB, np.uint8))
        time.sleep(0.4)


def too_much(run) -> Results:
    try:
        run_in_child(run, limit=bytes_of("VmRSS") + 130 * MB)
    except TooMuchMemory as error:
        return {"too_much": np.array(str(error)), "reached": np.array(error.reached - bytes_of("VmRSS"))}
    return {"too_much": np.array("nothing"), "reached": np.array(1000 * MB)}


def looked_at_rarely() -> Results:
    """As if this process had to wait for a core. Then the same for a run that does not stop itself. Both without the
    reserve for what it grows by between two looks, which keeps the limit too, and earlier."""
    grows, watch._GROWS = watch._GROWS, 0
    at_full_speed = partial(take_a_gigabyte, 0)
    watch._LOOKS_EVERY = 0.3
    results = {"rarely": too_much(at_full_speed)["reached"]}
    watch._LOOKS_EVERY = 30  # time enough to take all of it, on a busy machine too
    child.in_turns = nullcontext
    results["rarely_without_turns"] = too_much(at_full_speed)["reached"]
    watch._GROWS = grows
    return results


def in_spurts() -> Results:
    """Between two looks it grows by more than what is usually kept free. The control keeps no more free then."""
    child.in_turns = nullcontext
    watch._LOOKS_EVERY = watch._TURN = 0.4
    results = {"in_spurts": too_much(take_in_spurts)["reached"]}
    watch._GROWS = 0
    return {**results, "in_spurts_without_reserve": too_much(take_in_spurts)["reached"]}


def written() -> Results:
    weight = ms.Parameter(Tensor(np.ones(100 * MB // 4, np.float32)))
    weight.asnumpy()

    before = bytes_of("VmRSS")
    watch = Watch()
    peak = run_in_child(lambda: weight.asnumpy().fill(2.0) or time.sleep(0.3), [weight]).peak
    return {
        "written_together": np.array(watch.most - before),
        "written_peak": np.array(peak - before),
        "weight_unchanged": np.array((weight.asnumpy() == 1).all()),
    }


def main(out: Path) -> None:
    ProcessMeter()
    results = written()
    nothing = run_in_child(lambda: None).peak
    before = bytes_of("VmRSS")
    for size in (64 * 1024, 25 * MB):
        results[f"peak_{size}"] = np.array(run_in_child(lambda size=size: blocks(size)).peak - nothing)
    results |= too_much(partial(take_a_gigabyte, 0.001))
    results |= {
        "error": np.array(error_of(fail)),
        "killed": np.array(error_of(lambda: os.kill(os.getpid(), signal.SIGKILL))),
        "left": np.array(error_of(lambda: os._exit(3))),
        "grown": np.array(bytes_of("VmRSS") - before),
    }
    results |= looked_at_rarely() | in_spurts()
    leave(out, 0, results)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
