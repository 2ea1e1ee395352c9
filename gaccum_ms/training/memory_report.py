"""memory_report: measures and predicts the memory of a training step."""

from __future__ import annotations

import mindspore as ms
from mindspore import nn

from gaccum_ms.cell import GradAccumulationCell, cell_with_loss
from gaccum_ms.memory.report import MemoryReport, report_of
from gaccum_ms.memory.trial import Trials
from gaccum_ms.training.step import step_on_trial


def memory_report(
    cell: GradAccumulationCell,
    optimizer: nn.Optimizer,
    *batch: ms.Tensor,
    memory_limit: int | None = None,
    loss_fn: nn.Cell | None = None,
) -> MemoryReport:
    r"""
    Measure a training step's memory for 1, 2, 4, ... micro-batches, and predict it where it exceeds the limit.

    Trials train a few micro-batches of a size, from the smallest on; each compiles a graph. Each sample adds the same
    memory, so a straight line through the sizes before says what the next one needs, and it is tried only if it is
    predicted to fit.

    On CPU, a trial runs in a copy of this process, without the update, whose memory is known, and the peak of its
    resident memory is read. The copy is ended before both exceed the limit. This process does not change. On
    accelerators, a trial runs in this process, and the peak of MindSpore's allocator is read; everything that it
    changes is restored, bit for bit. Call it before training: on CPU, memory that training has freed may count as used.

    Args:
        cell (GradAccumulationCell): The network with its loss and the options; its number of micro-batches is ignored.
        optimizer (Optimizer): The optimizer that is to train it.
        *batch (Tensor): The inputs of one batch of this rank, each of shape :math:`(N, ...)`.

    Keyword Args:
        memory_limit (int, optional): This rank's memory limit in bytes: for the process on CPU, for MindSpore on
            accelerators. Default: ``None`` , the device's free memory; on CPU the rank's share of the container's
            limit, or of the host's free memory.
        loss_fn (Cell, optional): The loss that `mindspore.Model` gets, if the network returns none. Default: ``None`` .

    Returns:
        :class:`MemoryReport` , a dataclass that prints as a table: ``parameters`` , ``optimizer_state`` ,
        ``accumulators`` and ``batch`` in bytes; ``rows`` , one for each number of micro-batches; ``memory_limit`` ;
        ``fits_from`` , the smallest number from which on all fit, or None.

    Raises:
        TypeError: If an argument or input has another type than above.
        ValueError: If the batch is empty, its inputs differ in length, or `memory_limit` is less than 1; if the network
            is a WithBatchLossCell; if it has SyncBatchNorm layers, on several ranks.
        RuntimeError: In semi-auto and auto parallel mode, where the compiler distributes memory over devices; on a CPU
            whose system does not report the peak of a process.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from gaccum_ms import GradAccumulationCell, memory_report
        >>> net = nn.Dense(1000, 10)
        >>> optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
        >>> cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), 4)
        >>> x, y = Tensor(np.ones((8, 1000), np.float32)), Tensor(np.ones((8, 10), np.float32))
        >>> report = memory_report(cell, optimizer, x, y)
        >>> print(report.parameters, report.accumulators, [row.micro_batch_size for row in report.rows])
        40040 40040 [8, 4, 2, 1]
    """
    cell = cell_with_loss("memory_report", cell, loss_fn)
    return report_of(Trials("memory_report", cell, optimizer, batch, step_on_trial, memory_limit))
