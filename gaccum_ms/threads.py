"""tune_cpu: MindSpore's threads on CPU, for a training step of many small kernels, and convolutions' instructions."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

import mindspore as ms
import mindspore.dataset as ds
from mindspore import nn

from gaccum_ms.backend.checks import check_positive_int
from gaccum_ms.backend.convolutions import convolves
from gaccum_ms.backend.cpu_instructions import limit_instructions


class CpuThreads(NamedTuple):
    """What :func:`tune_cpu` asked for.

    Args:
        dispatch (int): Threads that start kernels.
        kernels (int): Threads that one kernel is divided among.
        data (int): Threads of each data set operation.
    """

    dispatch: int
    kernels: int
    data: int


def tune_cpu(cores: int | None = None, network: nn.Cell | None = None) -> CpuThreads:
    r"""
    Let MindSpore use the cores of this process, and no more threads than these: one thread that starts kernels, as
    many for each kernel, and as many for each data set operation, as there are cores. On a CPU with AVX-512 let
    convolutions run by their fast kernels.

    MindSpore's own numbers of threads (5, 25 and 8) suit a process that has a host of many cores to itself. They are
    limited by the host's cores, but not by this process's share of them. Call it before the first graph runs: MindSpore
    makes its threads then, and once. What the program has set by MindSpore's own
    `mindspore.runtime.dispatch_threads_num <https://www.mindspore.cn/docs/en/master/api_python/runtime/
    mindspore.runtime.dispatch_threads_num.html>`_ and `mindspore.device_context.cpu.op_tuning.threads_num
    <https://www.mindspore.cn/docs/en/master/api_python/device_context/
    mindspore.device_context.cpu.op_tuning.threads_num.html>`_ is kept; the number of data set threads is set in any
    case. Nothing in this package sets threads by itself.

    MindSpore's convolutions are oneDNN's, and on a CPU with AVX-512 these take up to eighty times as long as those for
    AVX2. So oneDNN is limited to AVX2 there, by its variable `ONEDNN_MAX_CPU_ISA
    <https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html>`_ , unless the environment sets it
    already: ``ONEDNN_MAX_CPU_ISA=ALL`` refuses. A warning of MindSpore's log says so. It must be done before the first
    matrix product or convolution of the process; later, a UserWarning says that it is too late. Our training steps do
    the same for a network that convolves, and leave others alone: a transformer took 1.2 times as long with AVX2.

    ``tune_cpu_threads`` , its former name, still works.

    Args:
        cores (int, optional): Cores that are this process's own; more than the host has count as these. Default:
            ``None`` , ``OMP_NUM_THREADS`` , which the launcher sets to each rank's share of the host; where it is not
            set, all cores that the process may run on.
        network (Cell, optional): What is to be trained: where it does not convolve, oneDNN is not limited. Default:
            ``None`` , unknown, and taken for one that does.

    Returns:
        CpuThreads, a named tuple of the numbers asked for: ``dispatch``, ``kernels``, ``data``.

    Raises:
        TypeError: If `cores` is not an int, or `network` not a Cell.
        ValueError: If `cores` , or ``OMP_NUM_THREADS`` , is not a positive number.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> from gaccum_ms import tune_cpu
        >>> print(tune_cpu(1))
        CpuThreads(dispatch=1, kernels=1, data=1)
    """
    if cores is None:
        cores = _cores_of_this_process()
    check_positive_int("tune_cpu", "cores", cores)
    if network is not None and not isinstance(network, nn.Cell):
        raise TypeError(f"For 'tune_cpu', the argument 'network' must be a Cell, but got '{type(network).__name__}'.")
    # MindSpore refuses more data threads than the host has cores, and has no use for more of the others.
    cores = min(cores, os.cpu_count() or 1)
    threads = CpuThreads(1, cores, cores)
    # MindSpore raises a RuntimeError for what has been set before: the program's own choice.
    with contextlib.suppress(RuntimeError):
        ms.runtime.dispatch_threads_num(threads.dispatch)
    with contextlib.suppress(RuntimeError):
        ms.device_context.cpu.op_tuning.threads_num(threads.kernels)
    ds.config.set_num_parallel_workers(threads.data)
    if network is None or convolves(network):
        limit_instructions()
    return threads


tune_cpu_threads = tune_cpu  # its name before it did more


def _cores_of_this_process() -> int:
    given = os.environ.get("OMP_NUM_THREADS")
    if given is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    first = given.split(",")[0].strip()  # OpenMP has a number for each level of nesting
    if not first.isdecimal() or not int(first):
        raise ValueError(
            f"For 'tune_cpu', the environment variable OMP_NUM_THREADS must be a positive number, but got "
            f"'{given}'. Correct or unset it, or give 'cores'."
        )
    return int(first)
