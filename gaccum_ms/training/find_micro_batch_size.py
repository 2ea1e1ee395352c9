"""find_micro_batch_size: the largest micro-batch that fits on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mindspore as ms
from mindspore import nn

from gaccum_ms.backend.out_of_memory import check_test, memory_test
from gaccum_ms.cell import GradAccumulationCell, cell_with_loss
from gaccum_ms.memory.search import found_size
from gaccum_ms.memory.trial import Trials
from gaccum_ms.training.step import step_on_trial

_NAME = "find_micro_batch_size"


def find_micro_batch_size(
    cell: GradAccumulationCell,
    optimizer: nn.Optimizer,
    batch: Sequence[ms.Tensor],
    memory_limit: int | None = None,
    is_out_of_memory: Callable[[BaseException], bool] | None = None,
    *,
    loss_fn: nn.Cell | None = None,
) -> int:
    r"""
    Find the largest micro-batch that fits into memory: for `micro_batch_size` of :class:`GradAccumulationCell` .

    Sizes are tried that double, from one sample on. A straight line through them says what larger ones need, and a size
    is tried only if it is predicted to fit. Only sizes that divide the batch as evenly as possible are considered: two
    micro-batches of 100 samples have 50 each, which need less memory than 60 and 40. What is found is at least 85 % of
    what fits.

    A trial trains as the training will. On CPU it runs in a copy of this process, without the update, whose memory is
    known; see :func:`memory_report` . In data parallel mode this is a collective: each rank tries by itself, without
    communication, and all ranks return the smallest size that any of them has found.

    If `split` of the cell is a :class:`MaxTokens` , its number of tokens is ignored. The largest number that fits is
    found in the same way, among the multiples of the largest width: a trial trains on a full micro-batch of each width.

    Trials change nothing: weights, optimizer state, all state that the network's `construct` writes, the cells' flags
    and the default generator are restored, bit for bit.

    Args:
        cell (GradAccumulationCell): The network with its loss and the options; its number of micro-batches is ignored.
        optimizer (Optimizer): The optimizer of the training.
        batch (Sequence[Tensor]): The inputs of one batch of this rank, each of shape :math:`(N, ...)`.
        memory_limit (int, optional): The memory limit of this rank, in bytes: of the process on CPU, of MindSpore on
            accelerators. Default: ``None`` : the free memory of the device; on CPU, the rank's share of the container's
            limit or of the host's free memory.
        is_out_of_memory (Callable, optional): Returns whether an error other than a MemoryError means that memory is
            not enough; all others are raised. Default: ``None`` : RuntimeErrors of MindSpore's allocators do.
        loss_fn (Cell, optional): The loss that `mindspore.Model` gets, if the network returns none. Default: ``None`` .

    Returns:
        int, the number of samples, from 1 to :math:`N`, the same on all ranks; with :class:`MaxTokens` , the number of
        tokens.

    Raises:
        TypeError: If an argument or input has another type than above.
        ValueError: If the batch is empty, its inputs differ in length, or `memory_limit` is less than 1; if the network
            is a WithBatchLossCell; if it has SyncBatchNorm layers, on several ranks; if the cell's `split` is a
            function other than :class:`MaxTokens` .
        RuntimeError: If one sample does not fit on some rank; in semi-auto and auto parallel mode, in which the
            compiler distributes memory over devices; on a CPU whose system does not report the used memory.

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
    if not isinstance(batch, Sequence):  # the rows of a Tensor would be taken as inputs
        raise TypeError(
            f"For '{_NAME}', the argument 'batch' must be a tuple or list of Tensors, but got a "
            f"'{type(batch).__name__}'. Pass a network's only input as (batch,)."
        )
    check_test(_NAME, is_out_of_memory)
    cell = cell_with_loss(_NAME, cell, loss_fn)
    trials = Trials(_NAME, cell, optimizer, batch, step_on_trial, memory_limit)
    return found_size(trials, memory_test(is_out_of_memory))
