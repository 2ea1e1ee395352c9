"""One measured program in one process, or one rank of it: ``worker.py <setting as JSON> <address of the controller>``.

It makes the first call and reports it. Then it reads one command per line from the controller's socket, and answers
each with a line of JSON:

    updates <number>    make that many updates; answers the seconds that each took
    loss                make one update; answers its loss, on this rank
    peak                answers the largest resident size of the process so far, in bytes

The controller sets the number of updates, because ranks must agree on it. The worker ends when its socket is closed, so
it cannot outlive its controller by more than one command.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from typing import Any

import numpy as np

from benchmarks.ways import WAYS, Setting


def peak_memory() -> int:
    """The peak of this process in bytes, from VmHWM; getrusage would begin with the parent's size at the fork."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def timed(step: Any) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main(setting: Setting, address: str) -> None:
    program = WAYS[setting.way].build(setting)  # first, because MindSpore's scheduler, which is no rank, stops here
    with socket.socket(socket.AF_UNIX) as controller:
        controller.connect(f"\0{address}")
        lines = controller.makefile("r")

        def answer(value: Any) -> None:
            controller.sendall(json.dumps(value).encode() + b"\n")

        before = program.weight()
        first_call = timed(program.step)
        trains = not np.array_equal(before, program.weight())
        about = {"weight_bytes": program.weight_bytes, "threads": program.threads}
        answer({"first_call": first_call, "trains": trains, **about})
        for line in lines:
            command, *arguments = line.split()
            if command == "updates":
                answer([timed(program.step) for _ in range(int(arguments[0]))])
            elif command == "loss":
                answer(program.step())
            else:
                answer(peak_memory())


if __name__ == "__main__":
    main(Setting(**json.loads(sys.argv[1])), sys.argv[2])
