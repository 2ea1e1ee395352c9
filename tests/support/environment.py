"""The environment of the tests' processes, and of a user's programs.

MindSpore's threads spin while they wait for each other. With more processes than cores, spinning took a quarter of all
CPU time in PyNative mode, and a tenth in graph mode. So operators run in Python's thread in PyNative mode, here and in
the processes that tests start. In graph mode, a kernel has one thread, here and in the ranks of ranks.py. The programs
of docs/ and sample_code/ run with MindSpore's own threads, as a user's do, and so do all tests if the environment has
``MS_DEV_HOST_BLOCKING_RUN=0`` .

Ranks that MindSpore connects wait 3 to 5 seconds between two tries, at their start and at their end; here one.

On a CPU with AVX-512, oneDNN can be limited only before the first computation; later tests with convolutions would
warn. test_instructions.py starts processes without this variable.
"""

from __future__ import annotations

import os

import mindspore as ms

from tests.support.device import DEVICE

BLOCKING = "MS_DEV_HOST_BLOCKING_RUN"
_given = BLOCKING in os.environ


def of_tests() -> None:
    """Set the variables and the threads, before the first operator."""
    os.environ.setdefault(BLOCKING, "1")
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
    os.environ.setdefault("MS_RETRY_INTERVAL_LOWER", "1")
    os.environ.setdefault("MS_RETRY_INTERVAL_UPPER", "1")
    of_graphs()


def of_graphs() -> None:
    """Give one thread to each kernel, before the first graph runs."""
    if DEVICE == "CPU" and os.environ.get(BLOCKING) == "1":
        ms.runtime.dispatch_threads_num(1)
        ms.device_context.cpu.op_tuning.threads_num(1)


def of_users() -> dict[str, str]:
    """The environment with MindSpore's threads, unless the variable was given."""
    return {name: value for name, value in os.environ.items() if name != BLOCKING or _given}
