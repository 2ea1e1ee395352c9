"""The environment of the tests' processes, and of a user's programs.

In PyNative mode, MindSpore's threads spin while they wait for each other. With as many processes as cores, spinning
took a quarter of all CPU time. So operators run in Python's thread, here and in the processes that tests start. The
programs of docs/ and sample_code/ run with these threads, as a user's do, and so do all tests if the environment has
``MS_DEV_HOST_BLOCKING_RUN=0`` .

On a CPU with AVX-512, oneDNN can be limited only before the first computation; later tests with convolutions would
warn. test_cpu_instructions.py starts processes without this variable.
"""

from __future__ import annotations

import os

BLOCKING = "MS_DEV_HOST_BLOCKING_RUN"
_given = BLOCKING in os.environ


def of_tests() -> None:
    """Set the variables, before the first operator."""
    os.environ.setdefault(BLOCKING, "1")
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")


def of_users() -> dict[str, str]:
    """The environment with MindSpore's threads, unless the variable was given."""
    return {name: value for name, value in os.environ.items() if name != BLOCKING or _given}
