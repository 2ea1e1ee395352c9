"""One measured program in one process, or one rank of it: ``worker.py MODULE SETTING ADDRESS``. The module has the
setting's class; the setting is JSON, and the address the controller's.

It makes the first call and reports it. Then it gets commands, each with a number, and answers each:

    updates     make that many updates; answers the seconds that each took
    loss        make one update; answers its loss, on this rank
    peak        answers the largest resident size of the process so far, in bytes
    details     answers what the program says of its updates

The controller sets the number of updates, because ranks must agree on it. The worker ends when the controller does, so
it cannot outlive it by more than one command.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from multiprocessing.connection import Client
from typing import Any

import numpy as np


def peak_memory() -> int:
    """The peak of this process in bytes, from VmHWM; getrusage would begin with the parent's size at the fork."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def timed(step: Any) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main(setting: Any, address: str) -> None:
    program = setting.described.build(setting)  # first: MindSpore's scheduler, which is no rank, stops here
    answers = {
        "updates": lambda number: [timed(program.step) for _ in range(number)],
        "loss": lambda _: program.step(),
        "peak": lambda _: peak_memory(),
        "details": lambda _: program.details(),
    }
    with Client(f"\0{address}", "AF_UNIX") as controller:
        before = program.weight()
        first_call = timed(program.step)
        trains = not np.array_equal(before, program.weight())
        about = {"weight_bytes": program.weight_bytes, "threads": program.threads}
        controller.send({"first_call": first_call, "trains": trains, **about})
        while True:
            try:
                command, number = controller.recv()
            except (EOFError, OSError):
                return
            controller.send(answers[command](number))


if __name__ == "__main__":
    main(importlib.import_module(sys.argv[1]).Setting(**json.loads(sys.argv[2])), sys.argv[3])
