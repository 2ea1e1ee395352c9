"""mindocr: `TrainOneStepWrapper` , with our step."""

from __future__ import annotations

from typing import Any

from mindspore import nn

from gaccum_ms.adopt.common import MovedAverage, build, clip_norm_of, scale_of
from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell

_NAME = "gaccum_ms.adopt.mindocr.train_step"


def train_step(
    network: nn.Cell,
    optimizer: nn.Optimizer,
    scale_sense: Any = 1.0,
    ema: nn.Cell | None = None,
    updates: int = 0,
    drop_overflow_update: bool = True,
    gradient_accumulation_steps: int = 1,
    clip_grad: bool = False,
    clip_norm: float = 1.0,
    verbose: bool = False,
    **options: Any,
) -> TrainOneStepWithGradAccumulationCell:
    r"""
    Our training step for the arguments of mindocr's `TrainOneStepWrapper
    <https://github.com/mindspore-lab/mindocr/blob/main/mindocr/utils/train_step_wrapper.py>`_ .

    Args:
        network (Cell): The network with its loss.
        optimizer (Optimizer): The optimizer of the network's weights. Its learning rate is per update.
        scale_sense (Union[float, Tensor, Cell]): Loss scale; a Cell adjusts it. Default: ``1.0`` .
        ema (Cell, optional): mindocr's `EMA` , which its callbacks use. It is moved once per update.
            Default: ``None`` .
        updates (int): Has no effect, as in mindocr: the `EMA` has its own. Default: ``0`` .
        drop_overflow_update (bool): Whether a window that is not finite is left out. Default: ``True`` .
        gradient_accumulation_steps (int): Batches that share an update. Default: ``1`` .
        clip_grad (bool): Whether to clip the window's mean gradient by its global norm. Default: ``False`` .
        clip_norm (float): That norm. Default: ``1.0`` .
        verbose (bool): Has no effect, as in mindocr. Default: ``False`` .
        **options (Any): Options of :class:`gaccum_ms.GradAccumulationCell` .

    Returns:
        TrainOneStepWithGradAccumulationCell, which returns the loss, whether the window overflowed, and the scale.

    Raises:
        TypeError: If `scale_sense` or `clip_grad` , or one of `options` , is of a wrong type.
        ValueError: If an argument has a wrong value; if `drop_overflow_update` is False with a Cell as `scale_sense` .

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``
    """
    return build(
        _NAME,
        network,
        optimizer,
        scale_of(_NAME, scale_sense),
        drop_overflow_update=drop_overflow_update,
        accumulation_steps=gradient_accumulation_steps,
        max_grad_norm=clip_norm_of(_NAME, clip_grad, "clip_grad", clip_norm),
        links=() if ema is None else (MovedAverage(_NAME, ema, "ema_update"),),
        **options,
    )
