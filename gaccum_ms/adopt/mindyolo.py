"""mindyolo: `create_train_step_fn` , with our step.

mindyolo's Trainer sums the gradients of a window's batches. The sum equals the joined batch's gradient if the loss is
multiplied by its batch's size, as most of mindyolo's losses are.
"""

from __future__ import annotations

from typing import Any

from mindspore import nn, ops

from gaccum_ms.adopt.common import OWNER, MovedAverage, build, check_left_out, clip_norm_of, scale_of
from gaccum_ms.checks.arguments import check_one_of
from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell

_MEANS = ("YOLOv4Loss", "YOLOXLoss")  # mindyolo's other losses are multiplied by the batch's size


class WithLossItems(nn.Cell):
    """Network and loss; returns the loss and the parts of it that mindyolo shows."""

    def __init__(self, network: nn.Cell, loss_fn: nn.Cell, loss_ratio: float, segments: bool) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.loss_fn = loss_fn
        self.loss_ratio = loss_ratio
        self.segments = segments

    def construct(self, images, labels, *segments):
        predicted = self.network(images)
        loss, items = self.loss_fn(predicted, labels, segments[0] if self.segments else images)
        loss_items: tuple = ()
        for index in range(items.shape[0]):
            loss_items = (*loss_items, items[index])
        return ((loss * self.loss_ratio).reshape(()), *loss_items)


class StepOfMindyolo(TrainOneStepWithGradAccumulationCell):
    """Our step, with the arguments and outputs of mindyolo's own function."""

    def __call__(self, *inputs):
        if inputs and isinstance(inputs[-1], bool):  # the Trainer's decision to update; our step decides itself
            inputs = inputs[:-1]
        loss, overflow, _, *items = super().__call__(*inputs)
        return loss, ops.stack(items), None, ops.logical_not(overflow)


def train_step(
    task: str,
    network: nn.Cell,
    loss_fn: nn.Cell,
    optimizer: nn.Optimizer,
    loss_ratio: float,
    scaler: Any,
    reducer: Any = None,
    ema: nn.Cell | None = None,
    overflow_still_update: bool = False,
    ms_jit: bool = False,
    clip_grad: bool = False,
    clip_grad_value: float = 10.0,
    accumulate: int = 1,
    reduction: str | None = None,
    **options: Any,
) -> TrainOneStepWithGradAccumulationCell:
    r"""
    Our training step for the arguments of mindyolo's `create_train_step_fn
    <https://github.com/mindspore-lab/mindyolo/blob/master/mindyolo/utils/train_step_factory.py>`_ . Give it to
    mindyolo's Trainer as `train_step_fn` , and call ``trainer.train(..., accumulate=1)`` : the step itself accumulates.

    Args:
        task (str): ``"detect"`` or ``"segment"`` .
        network (Cell): The network.
        loss_fn (Cell): mindyolo's loss, which returns the loss and its parts.
        optimizer (Optimizer): The optimizer of the network's weights.
        loss_ratio (float): The factor of the loss: the number of ranks.
        scaler (LossScaler): A LossScaler of mindspore.amp, a number, or a `scale_sense` of our step.
        reducer (Any): Has no effect: the step reduces, once per update. Default: ``None`` .
        ema (Cell, optional): mindyolo's `EMA` . It is moved once per update. Default: ``None`` .
        overflow_still_update (bool): Whether a window that is not finite updates too. Default: ``False`` .
        ms_jit (bool): Whether to compile in PyNative mode. Default: ``False`` .
        clip_grad (bool): Whether to clip the window's gradient by its global norm. Default: ``False`` .
        clip_grad_value (float): That norm. Default: ``10.0`` .
        accumulate (int): Batches that share an update. Default: ``1`` .
        reduction (str, optional): ``"sum"`` if the loss is multiplied by its batch's size, ``"mean"`` if it is
            not. Default: ``None`` , which is ``"mean"`` for the losses of YOLOv4 and YOLOX, else ``"sum"`` .
        **options (Any): Options of :class:`gaccum_ms.GradAccumulationCell` , except sizes of micro-batches: mindyolo's
            labels contain their image's position in the batch.

    Returns:
        TrainOneStepWithGradAccumulationCell. It returns the outputs of mindyolo's function: the loss, its parts,
        ``None`` instead of the gradients, and whether they are finite.

    Raises:
        TypeError: If an argument is of a wrong type.
        ValueError: If an argument has a wrong value; for a loss that is not mindyolo's, if `reduction` is not given.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``
    """
    check_one_of(OWNER, "task", task, ("detect", "segment"))
    kind = type(loss_fn).__name__
    if reduction is None:
        if not kind.startswith("YOLO"):
            raise ValueError(
                f"For '{OWNER}', the argument 'reduction' must be given for a loss that is not mindyolo's, but got a "
                f"'{kind}'. Give 'sum' if it is multiplied by the batch's size, and 'mean' if it is not."
            )
        reduction = "mean" if kind in _MEANS else "sum"
    for name in ("micro_size", "micro_batch_size"):
        check_left_out(name, options.get(name), "Give smaller batches, and a larger 'accumulate'.")
    return build(
        WithLossItems(network, loss_fn, loss_ratio, task == "segment"),
        optimizer,
        scale_of(scaler, "scaler"),
        StepOfMindyolo,
        drop_overflow_update=not overflow_still_update,
        accumulation_steps=accumulate,
        reduction=reduction,
        max_grad_norm=clip_norm_of(clip_grad, "clip_grad", clip_grad_value),
        links=(MovedAverage(ema, "update"),) if ema else (),
        aux=True,
        jit=True if ms_jit else None,
        **options,
    )
