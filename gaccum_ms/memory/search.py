"""find_micro_batch_size: the largest micro-batch that fits, by prediction and few trials, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.backend import no_grad
from gaccum_ms.backend.out_of_memory import check_test
from gaccum_ms.backend.out_of_memory import is_out_of_memory as says_out_of_memory
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.distributed.layout import rank_and_ranks
from gaccum_ms.layers.batchnorm import refuse_sync_batch_norm
from gaccum_ms.memory.forecast import Forecast
from gaccum_ms.memory.report import check_trial

if TYPE_CHECKING:
    from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell as Step

_NAME = "find_micro_batch_size"
_FEW = (2, 4)  # samples: what a line to larger ones begins with; with one sample, kernels are others
# What was found, on this rank: by network, and then by all else that decides.
_found: WeakKeyDictionary[nn.Cell, dict[tuple, int]] = WeakKeyDictionary()


def find_micro_batch_size(
    cell: GradAccumulationCell,
    optimizer: nn.Optimizer,
    batch: Sequence[ms.Tensor],
    memory_limit: int | None = None,
    is_out_of_memory: Callable[[BaseException], bool] | None = None,
) -> int:
    r"""
    Find the largest micro-batch that fits into memory: for `micro_batch_size` of :class:`GradAccumulationCell` .

    A static graph is compiled for each shape, so few are tried: micro-batches of 4 and 2 samples, then the largest that
    is predicted from these to fit, and again, from what that one has shown. Where one does not fit, the sizes below it
    are bisected. Only sizes that divide the batch as evenly as their number of micro-batches allows are considered: 100
    samples in two are 50 and 50, which need less than 60 and 40.

    A trial trains as the training will, updates included. On CPU it runs in a copy of this process, which ends before
    both together pass the limit; see :func:`memory_report` . In data parallel mode a collective: each rank tries by
    itself, without any communication, and all return the smallest of what the ranks have found. What is found is kept,
    for the same network, optimizer, options, shapes, dtypes, device and limit, as long as the network lives.

    For a cell with :class:`MaxTokens` as `split` , its number of tokens is ignored, and the largest that fits is found
    in the same way, among the multiples of the largest width: a trial trains a full micro-batch of each width.

    Trials leave nothing: weights, optimizer state, accumulators, BatchNorm's moving statistics, buffers and what else
    the network's `construct` writes, the cells' flags and the default generator are what they were, bit for bit.

    Args:
        cell (GradAccumulationCell): The network with its loss and the options; its number of micro-batches is ignored.
        optimizer (Optimizer): The optimizer that is to train it.
        batch (Sequence[Tensor]): The inputs of one batch of this rank, each of shape :math:`(N, ...)`.
        memory_limit (int, optional): Bytes that this rank may have: of the process on CPU, of MindSpore on
            accelerators. Default: ``None`` , what the device has free, on CPU the rank's share of the container's
            limit, or of what the host has free.
        is_out_of_memory (Callable, optional): Says of an error whether it means that memory is not enough; all others
            are raised. Default: ``None`` , MemoryError, and RuntimeError in the words of MindSpore's allocators.

    Returns:
        int, number of samples, from 1 to :math:`N`, the same on all ranks; with :class:`MaxTokens` , of tokens.

    Raises:
        TypeError: If `cell` is not a GradAccumulationCell, `optimizer` not an Optimizer, `batch` not a sequence, an
            input not a Tensor,
            `memory_limit` not an int, or `is_out_of_memory` not callable.
        ValueError: If the batch is empty, its inputs differ in length, or `memory_limit` is less than 1; if the network
            is a WithBatchLossCell; if it has SyncBatchNorm layers, on several ranks; if the cell's `split` is another
            function than :class:`MaxTokens` .
        RuntimeError: If not even one sample fits, on any rank; in semi-auto and auto parallel mode, where the compiler
            lays out memory over devices; on a CPU whose system does not say which memory is used.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from gaccum_ms import GradAccumulationCell, find_micro_batch_size
        >>> net = nn.Dense(1000, 10)
        >>> optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
        >>> network = nn.WithLossCell(net, nn.MSELoss())
        >>> batch = Tensor(np.ones((8, 1000), np.float32)), Tensor(np.ones((8, 10), np.float32))
        >>> size = find_micro_batch_size(GradAccumulationCell(network, 1), optimizer, batch)
        >>> print(size)  # of a few KB for each sample, all fit
        8
        >>> cell = GradAccumulationCell(network, micro_batch_size=size)
    """
    if not isinstance(batch, Sequence):  # a Tensor would give its rows as inputs
        raise TypeError(
            f"For '{_NAME}', the argument 'batch' must be a tuple or list of Tensors, but got a "
            f"'{type(batch).__name__}'. Pass a network's only input as (batch,)."
        )
    check_test(_NAME, is_out_of_memory)
    return found_size(_NAME, cell, optimizer, batch, memory_limit, is_out_of_memory or says_out_of_memory)


def found_size(
    owner: str,
    cell: GradAccumulationCell,
    optimizer: nn.Optimizer,
    batch: Sequence[ms.Tensor],
    memory_limit: int | None,
    fails: Callable[[BaseException], bool],
    step: Step | None = None,
) -> int:
    """What :func:`find_micro_batch_size` returns; for a step that finds its size itself, with it."""
    check_trial(_NAME, cell, optimizer, batch, memory_limit)
    refuse_sync_batch_norm(_NAME, cell.network)
    found = _found.setdefault(cell.network, {})
    key = search_key(cell, optimizer, batch, memory_limit, fails)
    if key not in found:
        alone = rank_and_ranks()[1] == 1  # on ranks the step has collectives, for which a trial has no partner
        forecast = Forecast(owner, cell, optimizer, batch, memory_limit, fails, step if alone else None)
        found[key] = _largest(forecast) * forecast.unit
    try:
        return agreed_size(_NAME, found[key], memory_limit)
    except RuntimeError:
        del found[key]
        raise


def search_key(
    cell: GradAccumulationCell,
    optimizer: nn.Optimizer,
    batch: Sequence[ms.Tensor],
    memory_limit: int | None,
    fails: Callable[[BaseException], bool],
) -> tuple:
    """All that decides what is found for a network."""
    options = (
        cell.accumulation_steps > 1,
        cell.finds_size,
        cell.counted,
        cell.loss_weights,
        cell.shared,
        _widths(cell, batch),
        cell.shard_accumulators,
        cell.compensated,
    )
    where = ms.get_context("device_target"), ms.get_context("device_id"), ms.get_context("mode"), bool(cell.jit)
    shapes = tuple((tuple(value.shape), str(value.dtype)) for value in batch)
    weights = tuple((one.name, tuple(one.shape), str(one.dtype)) for one in optimizer.get_parameters())
    flags = (one.get_flags() for _, one in cell.network.cells_and_names())
    casts = tuple(tuple(flag.get(dtype) for dtype in ("fp16", "fp32", "bf16")) for flag in flags)
    # Not the function itself: what it refers to, perhaps the network, would live as long as what was found.
    test = fails.__qualname__ if hasattr(fails, "__qualname__") else type(fails).__qualname__, id(fails)
    return shapes, weights, casts, str(cell.accumulator_dtype), options, where, memory_limit, test


def _widths(cell: GradAccumulationCell, batch: Sequence[ms.Tensor]) -> tuple | None:
    """What is tried with `MaxTokens` ."""
    worst = cell.split.worst_case(*batch) if cell.trims else None
    return None if worst is None else (worst.widths, worst.most)


def found_less(network: nn.Cell, key: tuple, size: int) -> None:
    """Training has shown that only `size` fits."""
    _found[network][key] = size


def _largest(forecast: Forecast) -> int:
    """What this rank finds; 0 if nothing fits."""
    sizes = forecast.sizes
    few = [size for size in sizes if size in _FEW]
    for size in few[::-1]:  # a line to larger ones
        forecast.measure(size)
    fitting = [size for size in few if forecast.may_fit(size)]
    if not fitting and 1 not in few:
        forecast.measure(1)
        fitting = [1] * forecast.may_fit(1)
    if not fitting:
        return 0
    # First those whose graph has no second part for a smaller micro-batch at the end, and with it less memory.
    largest = _climb(forecast, [size for size in sizes if not forecast.is_ragged(size)], max(fitting))
    largest = _climb(forecast, sizes, largest)
    if forecast.samples not in forecast.measured:
        forecast.probe_whole()
        largest = _climb(forecast, sizes[-1:], largest)
    return largest


def _climb(forecast: Forecast, sizes: list[int], largest: int) -> int:
    """The largest of these, or what was known to fit: each time the largest that is predicted to is tried."""
    failures = 0
    while larger := [size for size in sizes if size > largest and forecast.may_fit(size)]:
        # What failed has shown predictions to be too small: from then on halve what is left.
        size = larger[len(larger) // 2] if failures else larger[-1]
        forecast.measure(size)
        if forecast.may_fit(size):
            largest = size
        else:
            failures += 1
    return largest


def agreed_size(owner: str, size: int, memory_limit: int | None) -> int:
    """The smallest of all ranks' sizes. A collective, where there are several.

    Args:
        owner (str): What the error names.
        size (int): This rank's; 0: not even one sample fits.
        memory_limit (int or None): For the error.

    Raises:
        RuntimeError: On all ranks, if not even one sample fits on one of them.
    """
    sizes = [size]
    if rank_and_ranks()[1] > 1:
        with no_grad():
            gathered: Any = ops.AllGather()(ms.Tensor([size], ms.int32))
        sizes = gathered.asnumpy().tolist()
    if not min(sizes):
        ranks = [rank for rank, size in enumerate(sizes) if not size]
        limit = "the memory that there is" if memory_limit is None else f"memory_limit={memory_limit}"
        raise RuntimeError(
            f"For '{owner}', a micro-batch of one sample must fit, but got {limit}, which is not enough on rank(s) "
            f"{ranks}. Use a smaller network or lower precision, accumulator_dtype=None, or "
            f"gaccum_ms.ShardedOptimizer; 'memory_report' says what needs how much."
        )
    return min(sizes)
