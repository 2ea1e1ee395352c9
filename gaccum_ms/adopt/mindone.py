"""mindone: its three training steps, with ours: of its own trainers, which mindocr has too, of its transformers and of
its diffusers."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import nn

from gaccum_ms.adopt.common import OWNER, MovedAverage, build, check_left_out, clip_norm_of, scale_of
from gaccum_ms.checks.arguments import check_one_of, described
from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell
from gaccum_ms.transforms.clip_by_value import ClipByValue
from gaccum_ms.transforms.transform import Transform

_ZERO = "Give gaccum_ms.ShardedOptimizer(nn.AdamWeightDecay, ...) as the optimizer: it reduces once per update."
_NORMS = ("norm", "l2norm", "l2_norm", "global", "global_norm", "total", "total_norm")
_VALUES = ("local", "value")
_SCALERS = ("default", "static", "auto", "dynamic", "none")


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
    zero_helper: Any = None,
    **options: Any,
) -> TrainOneStepWithGradAccumulationCell:
    r"""
    Our training step for the arguments of `mindone.trainers.TrainOneStepWrapper
    <https://github.com/mindspore-lab/mindone/blob/master/mindone/trainers/train_step.py>`_ , and of mindocr's
    `TrainOneStepWrapper <https://github.com/mindspore-lab/mindocr/blob/main/mindocr/utils/train_step_wrapper.py>`_ .

    Args:
        network (Cell): The network with its loss.
        optimizer (Optimizer): Of the network's weights. Its learning rate is per update.
        scale_sense (Union[float, Tensor, Cell]): Loss scale; a Cell adjusts it. Default: ``1.0`` .
        ema (Cell, optional): The package's `EMA` , which its callbacks use. It is moved once per update.
            Default: ``None`` .
        updates (int): Has no effect, as in the packages: the `EMA` has its own. Default: ``0`` .
        drop_overflow_update (bool): Whether a window that is not finite is left out. Default: ``True`` .
        gradient_accumulation_steps (int): Batches that share an update. Default: ``1`` .
        clip_grad (bool): Whether to clip the window's mean gradient by its global norm. Default: ``False`` .
        clip_norm (float): That norm. Default: ``1.0`` .
        verbose (bool): Has no effect, as in the packages. Default: ``False`` .
        zero_helper (Any): Must be ``None`` : :class:`gaccum_ms.ShardedOptimizer` does its work. Default: ``None`` .
        **options (Any): Of :class:`gaccum_ms.GradAccumulationCell` .

    Returns:
        TrainOneStepWithGradAccumulationCell, which returns the loss, whether the window overflowed, and the scale.

    Raises:
        TypeError: If `scale_sense` or `clip_grad` , or one of `options` , is of a wrong type.
        ValueError: If an argument has a wrong value; if `drop_overflow_update` is False with a Cell as `scale_sense` ;
            if `zero_helper` is given.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``
    """
    check_left_out("zero_helper", zero_helper, _ZERO)
    return build(
        network,
        optimizer,
        scale_of(scale_sense),
        drop_overflow_update=drop_overflow_update,
        accumulation_steps=gradient_accumulation_steps,
        max_grad_norm=clip_norm_of(clip_grad, "clip_grad", clip_norm),
        links=() if ema is None else (MovedAverage(ema, "ema_update"),),
        **options,
    )


class StepOfTransformers(TrainOneStepWithGradAccumulationCell):
    """Our step, with the outputs that mindone's `Trainer` reads: the loss first, the overflow last."""

    def construct(self, *inputs):
        loss, overflow, scale = super().construct(*inputs)
        return loss, scale, overflow


def transformers_train_step(
    network: nn.Cell,
    optimizer: nn.Optimizer,
    ema: nn.Cell | None = None,
    drop_overflow_step: bool = True,
    scaler: str = "default",
    scaler_config: dict[str, Any] | None = None,
    gradient_accumulation_steps: int = 1,
    clip_grad: str = "none",
    clip_value: float = 1.0,
    zero_helper: Any = None,
    **options: Any,
) -> TrainOneStepWithGradAccumulationCell:
    r"""
    Our training step for the arguments of `mindone.transformers.mindspore_adapter.TrainOneStepWrapper
    <https://github.com/mindspore-lab/mindone/blob/master/mindone/transformers/mindspore_adapter/
    train_onestep_wrapper.py>`_ .

    Args:
        network (Cell): The network with its loss.
        optimizer (Optimizer): Of the network's weights. Its learning rate is per update.
        ema (Cell, optional): `mindone.trainers.EMA` . Default: ``None`` .
        drop_overflow_step (bool): Whether a window that is not finite is left out. Default: ``True`` .
        scaler (str): ``"default"`` and ``"static"`` : a fixed loss scale of 1024. ``"auto"`` and ``"dynamic"`` : an
            adjusted one. ``"none"`` : 1. Default: ``"default"`` .
        scaler_config (dict, optional): ``scale_value`` , ``scale_factor`` and ``scale_window`` . Default: ``None`` .
        gradient_accumulation_steps (int): Batches that share an update. Default: ``1`` .
        clip_grad (str): ``"norm"`` and its synonyms clip by the global norm; ``"value"`` and ``"local"`` clip each
            element; ``"none"`` . Default: ``"none"`` .
        clip_value (float): The largest norm, or the largest value. Default: ``1.0`` .
        zero_helper (Any): Must be ``None`` : :class:`gaccum_ms.ShardedOptimizer` does its work. Default: ``None`` .
        **options (Any): Of :class:`gaccum_ms.GradAccumulationCell` .

    Returns:
        TrainOneStepWithGradAccumulationCell, which returns the loss, the scale, and whether the window overflowed.
        mindone's step returns the gradients instead of the scale, but its `Trainer` does not read them.

    Raises:
        TypeError: If one of `options` is of a wrong type.
        ValueError: If an argument has a wrong value; if `drop_overflow_step` is False with a scale that is adjusted;
            if `zero_helper` is given.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``
    """
    check_left_out("zero_helper", zero_helper, _ZERO)
    clip_grad, scaler = clip_grad.lower(), scaler.lower()
    check_one_of(OWNER, "clip_grad", clip_grad, (*_NORMS, *_VALUES, "none"))
    check_one_of(OWNER, "scaler", scaler, _SCALERS)
    config = {"scale_value": 1024, "scale_factor": 2, "scale_window": 1000, **(scaler_config or {})}
    scale: nn.Cell | ms.Tensor
    if scaler in ("auto", "dynamic"):
        scale = nn.DynamicLossScaleUpdateCell(config["scale_value"], config["scale_factor"], config["scale_window"])
    else:
        scale = ms.Tensor(1.0 if scaler == "none" else float(config["scale_value"]), ms.float32)
    links: tuple[Transform, ...] = (ClipByValue(clip_value),) if clip_grad in _VALUES else ()
    if ema is not None:
        links = (*links, MovedAverage(ema, "ema_update"))
    return build(
        network,
        optimizer,
        scale,
        StepOfTransformers,
        drop_overflow_update=drop_overflow_step,
        accumulation_steps=gradient_accumulation_steps,
        max_grad_norm=clip_value if clip_grad in _NORMS else None,
        links=links,
        **options,
    )


class _Forward(nn.Cell):
    """The `forward` of a `TrainStep` , as a network."""

    def __init__(self, step: nn.Cell, aux: bool) -> None:
        super().__init__(auto_prefix=False)
        self.step = step
        self.aux = aux

    def construct(self, *inputs):
        outputs = self.step.forward(*inputs)
        return outputs if self.aux else outputs[0]


class StepOfDiffusers(TrainOneStepWithGradAccumulationCell):
    """Our step, which ends an open window with the epoch, has `sync_gradients` , and returns the `forward` outputs."""

    length_of_dataloader = 0

    @property
    def sync_gradients(self) -> bool:
        """Whether the last batch has ended its window."""
        return not int(self.window_position.asnumpy())

    def __call__(self, *inputs):
        outputs = super().__call__(*inputs)
        length = self.length_of_dataloader
        if length and int(self.batch_count.asnumpy()) % length == 0 and not self.sync_gradients:
            self.flush()
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return (outputs[0], *outputs[3 if self.update.scaled else 1 :])


def diffusers_train_step(
    train_step: nn.Cell,
    gradient_accumulation_steps: int | None = None,
    length_of_dataloader: int | None = None,
    aux: bool = True,
    **options: Any,
) -> TrainOneStepWithGradAccumulationCell:
    r"""
    Our training step for a `mindone.diffusers.training_utils.TrainStep
    <https://github.com/mindspore-lab/mindone/blob/master/mindone/diffusers/training_utils.py>`_ . It uses the
    `forward` , optimizer, loss scaler and `max_grad_norm` of the `TrainStep` .

    Args:
        train_step (Cell): A `TrainStep` with the user's `forward` . Do not call it afterwards: its accumulators, if
            any, are freed.
        gradient_accumulation_steps (int, optional): Batches that share an update. Default: ``None`` , the number of
            `train_step` .
        length_of_dataloader (int, optional): Batches of an epoch, at whose end an open window updates with its batches.
            0: windows span epochs. Default: ``None`` , the number of `train_step` .
        aux (bool): Whether to return the outputs of `forward` beside the loss: Tensors of shape :math:`()` , or with
            the batch's samples along axis 0. Default: ``True`` .
        **options (Any): Options of :class:`gaccum_ms.GradAccumulationCell` .

    Returns:
        TrainOneStepWithGradAccumulationCell. It returns a tuple of the loss and, with `aux` , the other outputs.
        ``step.sync_gradients`` is True if the last batch ended its window.

    Raises:
        TypeError: If `train_step` is no TrainStep.
        ValueError: If an argument has a wrong value.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``
    """
    from mindone.diffusers import training_utils

    if not isinstance(train_step, training_utils.TrainStep):
        raise TypeError(
            f"For '{OWNER}', the argument 'train_step' must be a 'mindone.diffusers.training_utils.TrainStep', but got "
            f"{described(train_step)}."
        )
    theirs = train_step.grad_accumulator
    steps = gradient_accumulation_steps or theirs.gradient_accumulation_steps or 1
    length = length_of_dataloader
    if length is None:
        length = theirs.length_of_dataloader if theirs.sync_with_dataloader else 0
    scaler = train_step.grad_scaler.loss_scaler
    fixed = isinstance(scaler, training_utils.StaticLossScaler)
    # `forward` calls `self.scale_loss` , which must now return the loss unchanged: our step scales and divides.
    train_step.grad_accumulator = training_utils.GradAccumulator(train_step.parameters, 1)
    train_step.grad_scaler = training_utils.GradScaler(None)
    scale = None if fixed and float(scaler.scale_value.asnumpy()) == 1.0 else scale_of(scaler, "loss_scaler")
    step = build(
        _Forward(train_step, aux),
        train_step.optimizer,
        scale,
        StepOfDiffusers,
        drop_overflow_update=not fixed,
        accumulation_steps=steps,
        max_grad_norm=train_step.grad_clipper.max_grad_norm,
        aux=aux,
        **options,
    )
    step.length_of_dataloader = length
    return step
