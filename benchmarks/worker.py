"""One measured program in one process: ``python -m benchmarks.worker <way> <network> <micro_size> <batch>``.

It makes the first call and reports it, then obeys one command per line of stdin, and answers each with a line of JSON:

    time <seconds>    make updates for that long, at least one; answers the seconds that each took
    peak              answers the largest resident size of the process so far, in bytes

It ends when stdin does, so it cannot outlive its controller by more than one step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np

from benchmarks.networks import NETWORKS
from benchmarks.ways import WAYS


def _peak_memory() -> int:
    """VmHWM, and not getrusage: that starts from the parent's size at the fork."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _timed(step: Any) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _times(step: Any, seconds: float) -> list[float]:
    deadline = time.perf_counter() + seconds
    times = [_timed(step)]
    while time.perf_counter() < deadline:
        times.append(_timed(step))
    return times


def main(way: str, network: str, micro_size: int, batch: int) -> None:
    # Frameworks print to stdout as they please, so the answers get a channel of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    program = WAYS[way].build(NETWORKS[network], batch, micro_size)
    before = program.weight()
    first_call = _timed(program.step)
    answer({"first_call": first_call, "trains": not np.array_equal(before, program.weight())})
    for line in sys.stdin:
        command, *arguments = line.split()
        answer(_times(program.step, float(arguments[0])) if command == "time" else _peak_memory())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
