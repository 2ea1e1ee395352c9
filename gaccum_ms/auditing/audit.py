"""audit: checks on one batch whether accumulation gives the whole batch's update; then restores everything."""

from __future__ import annotations

import mindspore as ms
from mindspore import nn

from gaccum_ms.auditing.measure import Recorder, measured, rounding
from gaccum_ms.auditing.report import AuditReport, judged
from gaccum_ms.backend.snapshot import Snapshot
from gaccum_ms.cell import GradAccumulationCell, cell_with_loss
from gaccum_ms.checks.arguments import check_is_optimizer
from gaccum_ms.checks.batches import batch_shapes
from gaccum_ms.options import compatibility
from gaccum_ms.options.rules import AUDIT, Setup
from gaccum_ms.splitting.even_split import plan_split


def audit(
    cell: GradAccumulationCell,
    optimizer: nn.Optimizer,
    *batch: ms.Tensor,
    tolerance: float | None = None,
    loss_fn: nn.Cell | None = None,
) -> AuditReport:
    r"""
    Check on one batch that accumulation gives a network the whole batch's update, before a long training.

    One update runs with the cell's options and one on the whole batch, from the same values; the latter is
    `nn.TrainOneStepCell <https://www.mindspore.cn/docs/en/master/api_python/nn/mindspore.nn.TrainOneStepCell.html>`_,
    or, with counts, ratios, several losses or `aux` , this project's step with one micro-batch. It compares the
    finished gradient (before `max_grad_norm` , which would hide a wrong size), the updated parameters (without
    `transforms` , and for information only: Adam hides a wrong size, and amplifies a gradient that is zero except for
    rounding) and the loss. It also checks whether the loss is a mean or a sum: on the batch repeated twice, a mean
    stays the same and a sum doubles. Where results differ, remedies are tried on the loss, as at the first batch.

    Afterwards parameters, optimizer state, buffers, other attributes that the network's `construct` writes, and the
    cells' flags are restored, bit for bit; compiled steps remain valid. The network runs in training mode. Dropout
    layers are switched off, because the masks of micro-batches cannot equal the whole batch's. MindSpore's default
    generator gets a fixed seed, and is restored afterwards. The whole batch runs forward and backward, and the doubled
    batch runs forward: use one that fits into memory.

    Args:
        cell (GradAccumulationCell): The network with its loss and the options of accumulation.
        optimizer (Optimizer): The optimizer that is to train it.
        *batch (Tensor): The inputs of one batch, each of shape :math:`(N, ...)`, of at least two micro-batches.

    Keyword Args:
        tolerance (float, optional): The largest relative error that counts as rounding, without unit.
            Default: ``None`` , 1e-4, or 2e-2 if weights, accumulators or `to_float` are float16 or bfloat16.
        loss_fn (Cell, optional): The loss that `mindspore.Model` gets, if the network returns none. Default: ``None`` .

    Returns:
        AuditReport, a dataclass that prints as a table. ``ok`` is True if no problem was found; ``problems`` has a
        description and a remedy for each: a loss that is a sum with ``reduction="mean"`` , or the reverse; BatchNorm
        layers; a network that couples samples although no known layer does, such as a contrastive loss with in-batch
        negatives, or whose mean is over items that `count` does not count; a loss that is random without a dropout
        layer. The table shows the other fields.

    Raises:
        TypeError: If `cell` is not a GradAccumulationCell, `optimizer` not an Optimizer, or an input not a Tensor.
        ValueError: If the batch would not be split, its inputs differ in length, or the cell's training step refuses
            it; if `tolerance` is not positive.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from gaccum_ms import GradAccumulationCell, audit
        >>> net = nn.Dense(3, 1, weight_init="ones", bias_init="zeros")
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
        >>> x, y = Tensor(np.ones((8, 3), np.float32)), Tensor(np.zeros((8, 1), np.float32))
        >>> print(audit(GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), 4), optimizer, x, y))
        loss                   9 on the whole batch, 9 accumulated (0.0e+00)
        loss behaves as        mean, the cell has reduction='mean'
        couples samples        no
        BatchNorm layers       none
        dropout, switched off  none
        worst relative error   gradient  after update
        weight                  0.0e+00       0.0e+00
        bias                    0.0e+00       0.0e+00
        verdict                ok
        >>> report = audit(GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss("sum")), 4), optimizer, x, y)
        >>> print(report.loss_behaves_as, report.reduction, report.loss_whole, report.loss_accumulated)
        sum sum 72.0 72.0
    """
    cell = cell_with_loss("audit", cell, loss_fn)
    _check(cell, optimizer, batch, tolerance)
    recorder = Recorder(optimizer, cell.max_grad_norm)
    before = Snapshot(cell, recorder)
    try:
        evidence = measured(cell, recorder, before, batch, tolerance or rounding(cell, recorder.parameters))
    finally:
        before.restore()
    return judged(evidence)


def _check(cell: GradAccumulationCell, optimizer: nn.Optimizer, batch: tuple, tolerance: float | None) -> None:
    check_is_optimizer("audit", optimizer)
    if tolerance is not None and not tolerance > 0:
        raise ValueError(f"For 'audit', the argument 'tolerance' must be positive, but got {tolerance!r}.")
    compatibility.check(AUDIT, "audit", Setup(cell.options, cell.network))
    shapes = batch_shapes(batch)
    if cell.trims:
        return
    plan = plan_split(shapes, cell.micro_size, cell.micro_batch_size, cell.shared, cell.axis)
    if plan.samples == plan.size:
        raise ValueError(
            f"For 'audit', the argument 'batch' must be split into at least two micro-batches, but got a batch of "
            f"{plan.samples} sample(s) with micro_size={cell.micro_size} and micro_batch_size={cell.micro_batch_size}: "
            f"there is nothing to compare. Use a larger batch or a larger 'micro_size'."
        )
