"""MindSpore's CPU threads, set for a training step of many small kernels."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

import mindspore as ms
import mindspore.dataset as ds

from gaccum_ms.options import check_positive_int


class CpuThreads(NamedTuple):
    """What :func:`tune_cpu_threads` asked for.

    Args:
        dispatch (int): Threads that start kernels.
        kernels (int): Threads that one kernel is divided among.
        data (int): Threads of each data set operation.
    """

    dispatch: int
    kernels: int
    data: int


def tune_cpu_threads(cores: int | None = None) -> CpuThreads:
    r"""
    Let MindSpore use the cores of this process, and no more threads than these: one thread that starts kernels, as
    many for each kernel, and as many for each data set operation, as there are cores.

    MindSpore's own numbers (5, 25 and 8) are for a process that has a host of many cores to itself: it takes no more
    than the host has cores, whatever share of them is this process's. Call it before the first graph runs: MindSpore
    makes its threads then, and once. What the program has set by MindSpore's own
    `mindspore.runtime.dispatch_threads_num <https://www.mindspore.cn/docs/en/master/api_python/runtime/
    mindspore.runtime.dispatch_threads_num.html>`_ and `mindspore.device_context.cpu.op_tuning.threads_num
    <https://www.mindspore.cn/docs/en/master/api_python/device_context/
    mindspore.device_context.cpu.op_tuning.threads_num.html>`_ is kept; the number of data set threads is set in any
    case. Nothing in this package calls it by itself.

    Args:
        cores (int, optional): Cores that are this process's own; more than the host has count as these. Default:
            ``None`` , ``OMP_NUM_THREADS`` , which the launcher sets to each rank's share of the host; where it is not
            set, all cores that the process may run on.

    Returns:
        CpuThreads, a named tuple of the numbers asked for: ``dispatch``, ``kernels``, ``data``.

    Raises:
        TypeError: If `cores` is not an int.
        ValueError: If `cores` , or ``OMP_NUM_THREADS`` , is not a positive number.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from gaccum_ms import tune_cpu_threads
        >>> print(tune_cpu_threads(1))
        CpuThreads(dispatch=1, kernels=1, data=1)
    """
    if cores is None:
        cores = _cores_of_this_process()
    check_positive_int("tune_cpu_threads", "cores", cores)
    # MindSpore refuses more data threads than the host has cores, and has no use for more of the others.
    cores = min(cores, os.cpu_count() or 1)
    threads = CpuThreads(1, cores, cores)
    # MindSpore raises a RuntimeError for what has been set before: the program's own choice.
    with contextlib.suppress(RuntimeError):
        ms.runtime.dispatch_threads_num(threads.dispatch)
    with contextlib.suppress(RuntimeError):
        ms.device_context.cpu.op_tuning.threads_num(threads.kernels)
    ds.config.set_num_parallel_workers(threads.data)
    return threads


def _cores_of_this_process() -> int:
    given = os.environ.get("OMP_NUM_THREADS")
    if given is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    first = given.split(",")[0].strip()  # OpenMP has a number for each level of nesting
    if not first.isdecimal() or not int(first):
        raise ValueError(
            f"For 'tune_cpu_threads', the environment variable OMP_NUM_THREADS must be a positive number, but got "
            f"'{given}'. Correct or unset it, or give 'cores'."
        )
    return int(first)
