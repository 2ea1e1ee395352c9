"""mindformers: `MFTrainOneStepCell` , with our step, and the Trainer's `gradient_accumulation_steps` outside semi-auto
mode.

Outside semi-auto mode, mindformers' Trainer sets the option back to 1, with a warning. In semi-auto and auto parallel
mode it uses MindSpore's cell or its own, which are not replaced.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from gaccum_ms.adopt.common import build, clip_norm_of, refuse, scale_of
from gaccum_ms.checks.arguments import check_positive_int
from gaccum_ms.options.checks import check_transforms
from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell
from gaccum_ms.transforms.clip_by_global_norm import ClipByGlobalNorm
from gaccum_ms.transforms.skip_spikes import SkipSpikes

_NAME = "gaccum_ms.adopt.mindformers.train_step"
_WRAPPER = "GaccumTrainOneStepCell"  # our step's name in mindformers' registry


class Loss(nn.Cell):
    """A model's loss, of shape (). mindformers' losses have shape (1,), and its newer models return parts of a loss."""

    def __init__(self, network: nn.Cell, per_token: bool, legacy: bool) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.per_token = per_token
        self.legacy = legacy

    def construct(self, *inputs):
        outputs = self.network(*inputs)
        if self.legacy:
            if self.per_token:
                return outputs[0].reshape(()), outputs[1].reshape(())
            return outputs.reshape(())
        if self.per_token:  # two pairs (loss, tokens), and two losses of experts
            whole = outputs[0] + outputs[2] + outputs[4] + outputs[5]
            return whole.reshape(()), outputs[1].reshape(())
        return (outputs[0] + outputs[1] + outputs[2] + outputs[3]).reshape(())


class StepOfMindformers(TrainOneStepWithGradAccumulationCell):
    """Our step, with the outputs that mindformers' callbacks read."""

    judges = False  # whether updates with a large norm are left out

    def construct(self, *inputs):
        rate = self.optimizer.get_lr()
        if isinstance(rate, (tuple, list)):
            rate = rate[-1]  # the last group's, as in mindformers
        rate = rate.reshape(()) + 0.0
        loss, overflow, scale = super().construct(ops.depend(inputs[0], rate), *inputs[1:])
        norm = None
        if self.judges:
            norm = ops.depend(self.judged_norm, loss) + 0.0
        elif self.update.max_grad_norm is not None:
            norm = ops.depend(self.grad_norm, loss) + 0.0
        return loss, overflow, scale, rate, norm


def train_step(
    network: nn.Cell,
    optimizer: nn.Optimizer,
    use_clip_grad: bool = False,
    max_grad_norm: float = 1.0,
    scale_sense: Any = 1.0,
    local_norm: bool = False,
    calculate_per_token_loss: bool = False,
    global_norm_spike_threshold: float = 1.0,
    use_skip_data_by_global_norm: bool = False,
    print_separate_loss: bool = False,
    gradient_accumulation_steps: int = 1,
    parallel_config: Any = None,
    lr_scheduler: Any = None,
    grouped_lr_scheduler: Any = None,
    **options: Any,
) -> TrainOneStepWithGradAccumulationCell:
    r"""
    Our training step for the arguments of mindformers' `MFTrainOneStepCell
    <https://www.mindspore.cn/mindformers/docs/en/master/index.html>`_ .

    Args:
        network (Cell): A model of mindformers, which returns its loss.
        optimizer (Optimizer): The optimizer of the network's weights. Its learning rate is per update.
        use_clip_grad (bool): Whether to clip the finished gradient by its global norm. Default: ``False`` .
        max_grad_norm (float): That norm. Default: ``1.0`` .
        scale_sense (Union[float, Tensor, Cell]): Loss scale; a Cell adjusts it. Default: ``1.0`` .
        local_norm (bool): Must be False. Default: ``False`` .
        calculate_per_token_loss (bool): Whether the model returns the loss's sum and its number of tokens. The loss is
            then the mean over all tokens of the window and of all ranks. Default: ``False`` : the model returns a mean
            over its tokens, and micro-batches are weighted by their samples, or by `count` .
        global_norm_spike_threshold (float): See below. Default: ``1.0`` .
        use_skip_data_by_global_norm (bool): Whether to skip updates whose global norm, before clipping, is
            `global_norm_spike_threshold` or more. Default: ``False`` .
        print_separate_loss (bool): Has no effect: the parts of the loss are not recorded. Default: ``False`` .
        gradient_accumulation_steps (int): The number of micro-batches of each batch. The Trainer's setting of this name
            makes batches larger by this factor. Default: ``1`` .
        parallel_config (Any): Has no effect, as in mindformers. Default: ``None`` .
        lr_scheduler (Any): Has no effect: the optimizer has it. Default: ``None`` .
        grouped_lr_scheduler (Any): Must be ``None`` . Default: ``None`` .
        **options (Any): Options of :class:`gaccum_ms.GradAccumulationCell` , such as ``accumulation_steps=4`` , for
            windows of several batches.

    Returns:
        TrainOneStepWithGradAccumulationCell. It returns the loss, whether the window overflowed, the scale, the
        learning rate, and the gradient's norm before clipping, or ``None`` if no option needs the norm.

    Raises:
        TypeError: If an argument is of a wrong type.
        ValueError: If an argument has a wrong value; if `local_norm` or `grouped_lr_scheduler` is given.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``
    """
    if local_norm:
        refuse(_NAME, "local_norm", local_norm, "Norms of each rank's gradients are not there: all ranks reduce once.")
    if grouped_lr_scheduler is not None:
        refuse(
            _NAME, "grouped_lr_scheduler", grouped_lr_scheduler, "Give the optimizer groups with rates of their own."
        )
    check_positive_int(_NAME, "gradient_accumulation_steps", gradient_accumulation_steps)
    max_norm = clip_norm_of(_NAME, use_clip_grad, "use_clip_grad", max_grad_norm)
    if use_skip_data_by_global_norm:
        clip = () if max_norm is None else (ClipByGlobalNorm(max_norm),)
        own = options.get("transforms", ())
        check_transforms(_NAME, "transforms", own)
        options["transforms"] = (SkipSpikes(norm=_just_below(global_norm_spike_threshold)), *clip, *own)
        max_norm = None
    if calculate_per_token_loss:
        options["reduction"] = "ratio"
    if options.get("micro_batch_size") is None:
        options.setdefault("micro_size", gradient_accumulation_steps)
    options.setdefault("accumulation_steps", 1)
    step = build(
        _NAME,
        Loss(network, bool(calculate_per_token_loss), _is_legacy()),
        optimizer,
        scale_of(_NAME, scale_sense),
        StepOfMindformers,
        max_grad_norm=max_norm,
        **options,
    )
    step.judges = bool(use_skip_data_by_global_norm)
    return step


def _just_below(threshold: Any) -> Any:
    """The next smaller float32: mindformers skips an update at the threshold, `SkipSpikes` only above its norm."""
    if type(threshold) not in (int, float) or not 0 < threshold < np.inf:
        return threshold  # refused by SkipSpikes
    return float(np.nextafter(np.float32(threshold), np.float32(0)))


def _is_legacy() -> bool:
    """Whether models return one loss, or a pair: mindformers' setting, by default True."""
    try:
        from mindformers.core.context.build_context import is_legacy_model
    except ImportError:
        return True
    return bool(is_legacy_model())


def use_in_trainer() -> None:
    """
    Make mindformers' Trainer accumulate, stand-alone and in data parallel mode: there
    `runner_config.gradient_accumulation_steps` keeps its value. If it is more than 1, our step replaces
    `MFTrainOneStepCell` , with the options of `runner_wrapper` in the configuration. Call it once, before training. In
    semi-auto and auto parallel mode nothing changes.

    Raises:
        ImportError: If mindformers is not installed.
    """
    from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
    from mindformers.trainer.base_trainer import BaseTrainer

    if getattr(BaseTrainer, "accumulates_by_gaccum_ms", False):
        return
    MindFormerRegister.register_cls(train_step, MindFormerModuleType.WRAPPER, alias=_WRAPPER)
    for name, changed in (
        ("_check_grad_accumulation_steps", _keep_setting),
        ("wrap_network_with_tool_cells", _leave_unwrapped),
        ("create_model_wrapper", _wrap),
        ("sort_callbacks", _leave_loss_undivided),
    ):
        setattr(BaseTrainer, name, _around(inspect.getattr_static(BaseTrainer, name), changed))
    BaseTrainer.accumulates_by_gaccum_ms = True


def _around(original: Any, changed: Callable) -> Callable:
    @functools.wraps(original)
    def method(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        return changed(original.__get__(trainer), trainer, *args, **kwargs)

    return method


def _is_ours(trainer: Any) -> bool:
    """Whether this training accumulates by our step: the setting is above 1, in stand-alone or data parallel mode."""
    steps = trainer.config.runner_config.gradient_accumulation_steps
    mode = ms.get_auto_parallel_context("parallel_mode")
    ours = mode in (ms.ParallelMode.STAND_ALONE, ms.ParallelMode.DATA_PARALLEL)
    return ours and isinstance(steps, int) and not isinstance(steps, bool) and steps > 1


def _without_setting(original: Callable, trainer: Any, *args: Any) -> Any:
    """Call the method with `gradient_accumulation_steps` of 1."""
    runner = trainer.config.runner_config
    steps, runner.gradient_accumulation_steps = runner.gradient_accumulation_steps, 1
    try:
        return original(*args)
    finally:
        runner.gradient_accumulation_steps = steps


def _keep_setting(original: Callable, trainer: Any) -> None:
    return _without_setting(original, trainer) if _is_ours(trainer) else original()


def _leave_unwrapped(original: Callable, trainer: Any, network: nn.Cell) -> nn.Cell:
    return _without_setting(original, trainer, network) if _is_ours(trainer) else original(network)


def _wrap(original: Callable, trainer: Any, network: nn.Cell, optimizer: nn.Optimizer) -> nn.Cell:
    wrapper = trainer.config.runner_wrapper
    if not _is_ours(trainer):
        return original(network, optimizer)
    if wrapper is None or wrapper.type != "MFTrainOneStepCell":
        raise ValueError(
            f"For 'gaccum_ms.adopt.mindformers.use_in_trainer', 'runner_wrapper.type' must be 'MFTrainOneStepCell', "
            f"but got {None if wrapper is None else wrapper.type!r}: our step takes its place. Give that type, or "
            f"gradient_accumulation_steps=1."
        )
    wrapper.type = _WRAPPER
    wrapper.gradient_accumulation_steps = trainer.config.runner_config.gradient_accumulation_steps
    try:
        return original(network, optimizer)
    finally:
        wrapper.type = "MFTrainOneStepCell"
        del wrapper["gradient_accumulation_steps"]


def _leave_loss_undivided(original: Callable, trainer: Any, callbacks: list) -> list:
    """Stop mindformers' monitor from dividing the loss: other cells return a sum, but our step returns the mean."""
    if _is_ours(trainer):
        for callback in callbacks:
            if hasattr(callback, "gradient_accumulation_steps"):
                callback.gradient_accumulation_steps = 1
    return original(callbacks)
