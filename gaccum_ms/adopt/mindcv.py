"""mindcv: `TrainStep` and `create_trainer` , with our step."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

from gaccum_ms.adopt.common import build, clip_norm_of, scale_of
from gaccum_ms.backend.parameters import of_this_rank
from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell
from gaccum_ms.transforms.weight_average import PREFIX, WeightAverage

WARMUP = 2000  # updates, as in mindcv's average


class Average(WeightAverage):
    """A WeightAverage with the names of mindcv's checkpoints: ``ema.<weight>`` ."""

    def state(self, name: str, value: np.ndarray) -> ms.Parameter:
        if name.startswith(PREFIX):
            return of_this_rank(f"ema.{name[len(PREFIX) :]}", ms.Tensor(value))
        return super().state(name, value)


def train_step(
    network: nn.Cell,
    optimizer: nn.Optimizer,
    scale_sense: Any = 1.0,
    ema: bool = False,
    ema_decay: float = 0.9999,
    clip_grad: bool = False,
    clip_value: float = 15.0,
    gradient_accumulation_steps: int = 1,
    **options: Any,
) -> TrainOneStepWithGradAccumulationCell:
    r"""
    Our training step for the arguments of mindcv's `TrainStep
    <https://github.com/mindspore-lab/mindcv/blob/main/mindcv/utils/train_step.py>`_ .

    Args:
        network (Cell): The network with its loss.
        optimizer (Optimizer): The optimizer of the network's weights. Its learning rate is per update, as in mindcv's
            step with MindSpore 2.2 and later.
        scale_sense (Union[float, Tensor, Cell]): Loss scale. With a number or a Tensor, a window that is not finite
            updates too, as in mindcv; a Cell adjusts the scale, and such a window does not update.
            Default: ``1.0`` .
        ema (bool): Whether to keep an average of the weights, as :class:`gaccum_ms.WeightAverage` with ``warmup=2000``
            and ``buffers=True`` does. Default: ``False`` .
        ema_decay (float): Its decay. Default: ``0.9999`` .
        clip_grad (bool): Whether to clip the window's mean gradient by its global norm. Default: ``False`` .
        clip_value (float): That norm. Default: ``15.0`` .
        gradient_accumulation_steps (int): Batches that share an update. Default: ``1`` .
        **options (Any): Options of :class:`gaccum_ms.GradAccumulationCell` , such as ``micro_batch_size="auto"`` .

    Returns:
        TrainOneStepWithGradAccumulationCell, for `ms.Model(step)` . It returns the loss; or, with a scale other than
        the number 1, the loss, whether the window overflowed, and the scale.

    Raises:
        TypeError: If `scale_sense` or `clip_grad` , or one of `options` , is of a wrong type.
        ValueError: If an argument has a wrong value.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``
    """
    scale = scale_of(scale_sense)
    return build(
        network,
        optimizer,
        None if _is_one(scale) else scale,
        drop_overflow_update=isinstance(scale, nn.Cell),
        accumulation_steps=gradient_accumulation_steps,
        max_grad_norm=clip_norm_of(clip_grad, "clip_grad", clip_value),
        links=(Average(ema_decay, warmup=WARMUP, buffers=True),) if ema else (),
        **options,
    )


def _is_one(scale: nn.Cell | ms.Tensor) -> bool:
    return isinstance(scale, ms.Tensor) and scale.size == 1 and float(scale.asnumpy().reshape(())) == 1.0


def create_trainer(*args: Any, **kwargs: Any) -> ms.Model:
    """
    `mindcv.utils.create_trainer` , with our training step.

    Args:
        *args (Any): As in mindcv.
        **kwargs (Any): As in mindcv.

    Returns:
        Model. It has our step if mindcv would use its `TrainStep` : with an average, clipping or accumulation.

    Raises:
        ImportError: If mindcv is not installed.
        ValueError: As in mindcv.
    """
    factory: Any = importlib.import_module("mindcv.utils.trainer_factory")
    theirs = factory.TrainStep
    factory.TrainStep = train_step
    try:
        return factory.create_trainer(*args, **kwargs)
    finally:
        factory.TrainStep = theirs


def state_monitor(model: ms.Model, *args: Any, model_ema: bool = False, **kwargs: Any) -> ms.Callback:
    """
    `mindcv.utils.callbacks.StateMonitor` , which evaluates the averages of the weights if `model` keeps them.

    mindcv's own class does so with ``model_ema=True`` , but passes Tensors to `load_param_into_net` , for which
    MindSpore 2.10 raises a TypeError.

    Args:
        model (Model): The result of :func:`create_trainer` .
        *args (Any): As in mindcv.
        model_ema (bool): Has no effect: the step decides. Default: ``False`` .
        **kwargs (Any): As in mindcv.

    Returns:
        Callback, a `StateMonitor` .

    Raises:
        ImportError: If mindcv is not installed.
    """
    theirs = importlib.import_module("mindcv.utils.callbacks").StateMonitor

    class Monitor(theirs):  # type: ignore[misc, valid-type]
        def apply_eval(self, run_context: ms.RunContext) -> np.ndarray:
            step = self.model.train_network
            with step.averaged_weights() if getattr(step, "has_averages", False) else contextlib.nullcontext():
                return super().apply_eval(run_context)

    return Monitor(model, *args, model_ema=False, **kwargs)
