r"""audit: checks on one batch whether accumulation gives a network the whole batch's update; then restores everything.

It compares the finished gradient, not only the updated parameters: an optimizer such as Adam divides by the gradient's
own size, so that its update looks right with a gradient that is K times too large.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from gaccum_ms import compatibility
from gaccum_ms.accumulation import accumulators, micro_batches
from gaccum_ms.audit_report import AuditReport, Evidence, Update, judged
from gaccum_ms.backend.eager_means import mean_of_elements
from gaccum_ms.backend.snapshot import Snapshot, as_numpy
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.compatibility import Setup
from gaccum_ms.layers.batchnorm import batch_norm_names
from gaccum_ms.layers.dropout import dropouts
from gaccum_ms.losses.batch_loss import WithBatchLossCell
from gaccum_ms.rules import AUDIT
from gaccum_ms.split import UNCUT, cut_axes
from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell

_NARROW = (ms.float16, ms.bfloat16)
_SEED = 1


def audit(
    cell: GradAccumulationCell, optimizer: nn.Optimizer, *batch: ms.Tensor, tolerance: float | None = None
) -> AuditReport:
    r"""
    Check on one batch that accumulation gives a network the whole batch's update, before a long training.

    One update runs with the cell's options and one on the whole batch, from the same values; the latter is
    `nn.TrainOneStepCell <https://www.mindspore.cn/docs/en/master/api_python/nn/mindspore.nn.TrainOneStepCell.html>`_,
    or, with counts or several losses, this project's step with one micro-batch. It compares the finished
    gradient (before `max_grad_norm` , which would hide a wrong size), the updated parameters (without `transforms` ,
    and for information only: Adam hides a wrong size, and amplifies a gradient that is zero except for rounding) and
    the loss. It also checks whether the loss is a mean or a sum: on the batch repeated twice, a mean stays the same and
    a sum doubles.

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

    Returns:
        AuditReport, a dataclass that prints as a table. ``ok`` is True if no problem was found; ``problems`` has a
        description and a remedy for each: a loss that is a sum with ``reduction="mean"`` , or the reverse; BatchNorm
        layers; a network that couples samples although no known layer does, such as a contrastive loss with in-batch
        negatives, or whose mean is over items that `count` does not count; a loss that is random without a dropout
        layer. The table shows the other fields: ``gradients`` , ``parameters`` , ``loss_whole`` ,
        ``loss_accumulated`` , ``loss_behaves_as`` , ``reduction`` , ``batch_norm_layers`` , ``couples_samples`` ,
        ``dropout_layers`` .

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
        >>> print(report.loss_behaves_as, report.loss_whole, report.loss_accumulated)
        sum 72.0 18.0
    """
    _check(cell, optimizer, batch, tolerance)
    recorder = _Recorder(optimizer, cell.max_grad_norm)
    before = Snapshot(cell, recorder)
    try:
        with warnings.catch_warnings():  # the report contains it
            warnings.filterwarnings("ignore", message="For 'GradAccumulationCell', the network has .* BatchNorm")
            accumulated_step = TrainOneStepWithGradAccumulationCell(_unclipped(cell), recorder).set_train()
            whole_step = _whole_batch_step(cell, recorder).set_train()
        losses = _Losses(cell).set_train()
        dropout_layers = _switch_dropout_off(cell.network)
        accumulated = _run(accumulated_step, recorder, batch)
        before.restore_values()
        whole = _run(whole_step, recorder, batch)
        before.restore_values()
        once, again = losses.on(batch), losses.on(batch)
        twice = losses.on(
            [
                value if axis == UNCUT else ops.concat((value, value), axis)
                for value, axis in zip(batch, cut_axes(len(batch), cell.shared, cell.axis), strict=True)
            ]
        )
    finally:
        before.restore()

    return judged(
        Evidence(
            names=tuple(weight.name for weight in recorder.parameters),
            whole=whole,
            accumulated=accumulated,
            once=once,
            again=again,
            twice=twice,
            tolerance=tolerance or _rounding(cell, recorder.parameters),
            reduction=cell.reduction,
            of_batch=isinstance(cell.network, WithBatchLossCell),
            counted=cell.counted,
            trimmed=cell.trims,
            batch_norm_layers=tuple(batch_norm_names(cell.network)),
            dropout_layers=dropout_layers,
        )
    )


def _check(cell: GradAccumulationCell, optimizer: nn.Optimizer, batch: tuple, tolerance: float | None) -> None:
    if not isinstance(cell, GradAccumulationCell):
        raise TypeError(
            f"For 'audit', the argument 'cell' must be a gaccum_ms.GradAccumulationCell, but got "
            f"'{type(cell).__name__}'."
        )
    if not isinstance(optimizer, nn.Cell) or getattr(optimizer, "parameters", None) is None:
        raise TypeError(
            f"For 'audit', the argument 'optimizer' must be an nn.Optimizer, but got '{type(optimizer).__name__}'."
        )
    if tolerance is not None and not tolerance > 0:
        raise ValueError(f"For 'audit', the argument 'tolerance' must be positive, but got {tolerance!r}.")
    compatibility.check(AUDIT, "audit", Setup(cell.options, cell.network))
    shapes = micro_batches.batch_shapes(batch)
    if cell.trims:
        return
    plan = micro_batches.plan_split(shapes, cell.micro_size, cell.micro_batch_size, cell.shared, cell.axis)
    if plan.samples == plan.size:
        raise ValueError(
            f"For 'audit', the argument 'batch' must be split into at least two micro-batches, but got a batch of "
            f"{plan.samples} sample(s) with micro_size={cell.micro_size} and micro_batch_size={cell.micro_batch_size}: "
            f"there is nothing to compare. Use a larger batch or a larger 'micro_size'."
        )


class _Recorder(nn.Cell):
    """The optimizer, with a record of its gradient. It clips after recording, instead of the step: a gradient that is
    clipped first would look right with a wrong size."""

    def __init__(self, optimizer: nn.Optimizer, max_grad_norm: float | None) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer
        self.parameters = optimizer.parameters
        self.max_grad_norm = max_grad_norm
        self.gradients = accumulators.allocate(self.parameters, ms.float32, "audit_gradients.")
        self.map = ops.HyperMap()

    def construct(self, gradients):
        gradients = ops.depend(gradients, self.map(accumulators.add_to, self.gradients, gradients))
        if self.max_grad_norm is not None:
            gradients = ops.clip_by_global_norm(gradients, self.max_grad_norm)
        return self.optimizer(gradients)


class _Losses(nn.Cell):
    """The network's loss or losses, without its other outputs. A separate cell, so that the network keeps no graph of
    the audit."""

    def __init__(self, cell: GradAccumulationCell) -> None:
        super().__init__(auto_prefix=False)
        self.network = cell.network
        self.ratio, self.aux = cell.returns_ratio, cell.aux

    def construct(self, *inputs):
        outputs = self.network(*inputs)
        if self.ratio:
            return outputs[0] / ops.stop_gradient(outputs[1])
        return outputs[0] if self.aux else outputs

    def on(self, batch: Sequence[ms.Tensor]) -> np.ndarray:
        losses = self(*batch)
        return np.array([as_numpy(loss) for loss in (losses if isinstance(losses, tuple) else (losses,))])


def _run(step: nn.Cell, recorder: _Recorder, batch: tuple[ms.Tensor, ...]) -> Update:
    ms.manual_seed(_SEED)
    with mean_of_elements():  # for MindSpore's own step in PyNative mode; ours does so itself
        loss = step(*batch)
    return Update(
        float(as_numpy(loss[0] if isinstance(loss, tuple) else loss)),
        [as_numpy(gradient) for gradient in recorder.gradients],
        [as_numpy(parameter) for parameter in recorder.parameters],
    )


def _unclipped(cell: GradAccumulationCell, **size: Any) -> GradAccumulationCell:
    """A cell with the same options and network, for one batch, without clipping, which the recorder does. All ranks
    must audit, so accumulators may be sharded as in training."""
    return cell.with_options(accumulation_steps=1, max_grad_norm=None, transforms=(), record_noise=False, **size)


def _whole_batch_step(cell: GradAccumulationCell, recorder: _Recorder) -> nn.Cell:
    """MindSpore's own step if it supports the weighting, so that our step is not compared with itself."""
    gathers = isinstance(cell.network, WithBatchLossCell) and cell.network.ranks > 1
    if cell.own_count is not None or cell.several_losses or gathers:
        whole = {"micro_size": 1, "micro_batch_size": None} | ({"split": None} if cell.trims else {})
        return TrainOneStepWithGradAccumulationCell(_unclipped(cell, **whole), recorder)
    more = cell.returns_ratio or cell.aux
    return nn.TrainOneStepCell(_Losses(cell) if more else cell.network, recorder)


def _switch_dropout_off(network: nn.Cell) -> tuple[str, ...]:
    layers = dropouts(network)
    for layer in layers.values():
        layer.add_flags(training=False)
    return tuple(layers)


def _rounding(cell: GradAccumulationCell, weights: Sequence[ms.Parameter]) -> float:
    dtypes = [cell.accumulator_dtype, *(weight.dtype for weight in weights)]
    flags = [layer.get_flags() for _, layer in cell.cells_and_names()]
    narrow = any(dtype in _NARROW for dtype in dtypes) or any(one.get("fp16") or one.get("bf16") for one in flags)
    return 2e-2 if narrow else 1e-4
