"""tune_cpu: sets MindSpore's threads on CPU, for training steps of many small kernels, and oneDNN's instructions."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

import mindspore as ms
import mindspore.dataset as ds
from mindspore import nn

from gaccum_ms.checks.arguments import check_positive_int
from gaccum_ms.cpu.convolutions import convolves
from gaccum_ms.cpu.instructions import limit_instructions


class CpuThreads(NamedTuple):
    """The numbers of threads that :func:`tune_cpu` has requested.

    Args:
        dispatch (int): Threads that start kernels.
        kernels (int): Threads of one kernel.
        data (int): Threads of each data set operation.
    """

    dispatch: int
    kernels: int
    data: int


def tune_cpu(cores: int | None = None, network: nn.Cell | None = None) -> CpuThreads:
    r"""
    Fit MindSpore's threads to the cores of this process: one thread starts kernels; each kernel, and each data set
    operation, has as many threads as there are cores. On a CPU with AVX-512, also select the fast kernels of
    convolutions.

    MindSpore's own numbers of threads (5, 25 and 8) suit a process that has a host of many cores to itself. They are
    limited by the host's cores, but not by this process's share of them. Call it before the first graph runs, because
    MindSpore then creates its threads, once. Values that the program has set by MindSpore's own
    `mindspore.runtime.dispatch_threads_num <https://www.mindspore.cn/docs/en/master/api_python/runtime/
    mindspore.runtime.dispatch_threads_num.html>`_ and `mindspore.device_context.cpu.op_tuning.threads_num
    <https://www.mindspore.cn/docs/en/master/api_python/device_context/
    mindspore.device_context.cpu.op_tuning.threads_num.html>`_ are kept; the number of data set threads is always set.
    No other function of this package sets threads.

    MindSpore runs convolutions by oneDNN, whose kernels for AVX-512 take up to eighty times as long as those for AVX2.
    So on a CPU with AVX-512, oneDNN is limited to AVX2, by its variable `ONEDNN_MAX_CPU_ISA
    <https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html>`_ , unless the environment sets it
    already: ``ONEDNN_MAX_CPU_ISA=ALL`` refuses. A warning in MindSpore's log reports it. The limit must be set before
    the process's first matrix product or convolution; later, there is a UserWarning that it is too late. Our training
    steps do the same for a network with convolutions, and not for others: a transformer took 1.2 times as long with
    AVX2.

    Args:
        cores (int, optional): The number of cores for this process, at most the host's. Default: ``None`` ,
            ``OMP_NUM_THREADS`` , which the launcher sets to each rank's share of the host; if it is not set, all cores
            on which the process may run.
        network (Cell, optional): The network to train: if it has no convolutions, oneDNN is not limited. Default:
            ``None`` , unknown, and treated as one with convolutions.

    Returns:
        CpuThreads, a named tuple of the requested numbers: ``dispatch``, ``kernels``, ``data``.

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
    # MindSpore refuses more data threads than the host has cores, and does not benefit from more of the others.
    cores = min(int(cores), os.cpu_count() or 1)
    threads = CpuThreads(1, cores, cores)
    # MindSpore raises a RuntimeError if the program has set the value before; that choice is kept.
    with contextlib.suppress(RuntimeError):
        ms.runtime.dispatch_threads_num(threads.dispatch)
    with contextlib.suppress(RuntimeError):
        ms.device_context.cpu.op_tuning.threads_num(threads.kernels)
    ds.config.set_num_parallel_workers(threads.data)
    if network is None or convolves(network):
        limit_instructions()
    return threads


def _cores_of_this_process() -> int:
    setting = os.environ.get("OMP_NUM_THREADS")
    if setting is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    first = setting.split(",")[0].strip()  # OpenMP has a number for each level of nesting
    if not first.isdecimal() or not int(first):
        raise ValueError(
            f"For 'tune_cpu', the environment variable OMP_NUM_THREADS must be a positive number, but got "
            f"'{setting}'. Correct or unset it, or give 'cores'."
        )
    return int(first)
