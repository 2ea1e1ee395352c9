"""mindformers: our step, in the place of `MFTrainOneStepCell` and `MFPipelineWithLossScaleCell` , and in its Trainer.

Stand-alone and in data parallel mode the Trainer sets `gradient_accumulation_steps` back to 1, with a warning. In
semi-auto and auto parallel mode it puts a cell that accumulates around the network, with `gradient_accumulation_steps`
micro-batches, or in a pipeline `micro_batch_num` , and a `MFPipelineWithLossScaleCell` around that.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from gaccum_ms.adopt.common import OWNER, build, check_left_out, clip_norm_of, scale_of
from gaccum_ms.checks.arguments import check_positive_int, check_transforms, first_of
from gaccum_ms.distributed.ranks import compiler_distributes
from gaccum_ms.distributed.stages import stages
from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell
from gaccum_ms.transforms.clip_by_global_norm import ClipByGlobalNorm
from gaccum_ms.transforms.skip_spikes import SkipSpikes

_WRAPPER = "GaccumTrainOneStepCell"  # our step's name in mindformers' registry

# Parameters that a forward changes, and callbacks of mindformers read and reset.
_WRITTEN_BY_FORWARD = ("expert_load", "topk_bias", "fi_accu", "fi_parameter", "fi_cache", "max_logits_val")


class Backbone(nn.Cell):
    """The model in semi-auto and auto parallel mode. mindformers' callbacks walk down `network` , and then look for
    `_backbone` , because its Trainer puts a `_VirtualDatasetCell` there."""

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self._backbone = network

    def construct(self, *inputs):
        return self._backbone(*inputs)


class Inputs(nn.Cell):
    """Returns its inputs."""

    def construct(self, *inputs):
        return inputs


class LaidSums(nn.Cell):
    """The sums of a batch whose inputs `laid` puts on devices."""

    def __init__(self, batch_sums: nn.Cell, laid: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.batch_sums, self.laid, self.unit_of = batch_sums, laid, batch_sums.unit_of

    def construct(self, *inputs):
        return self.batch_sums(*self.laid(*inputs))

    def sums(self, numbers, inputs):
        return self.batch_sums.sums(numbers, inputs)


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
            if self.per_token:  # a Reshape of what has no gradient does not compile in auto parallel mode
                return outputs[0].reshape(()), ops.reduce_sum(outputs[1])
            return outputs.reshape(())
        if self.per_token:  # two pairs (loss, tokens), and two losses of experts
            whole = outputs[0] + outputs[2] + outputs[4] + outputs[5]
            return whole.reshape(()), ops.reduce_sum(outputs[1])
        return (outputs[0] + outputs[1] + outputs[2] + outputs[3]).reshape(())


class StepOfMindformers(TrainOneStepWithGradAccumulationCell):
    """Our step, with the outputs that mindformers' callbacks read."""

    judges = False  # whether updates with a large norm are left out
    has_grouped_rates = False
    _laid: tuple[nn.Cell, ...] = ()

    def lay_inputs(self, laid: nn.Cell) -> None:
        """Let `laid` put a batch's inputs on devices."""
        self._laid = (laid,)
        self.window.batch_sums = LaidSums(self.window.batch_sums, laid)

    def _make_window(self) -> Any:
        window = super()._make_window()
        for laid in self._laid:
            window.batch_sums = LaidSums(window.batch_sums, laid)
        return window

    def note_rates(self, default: nn.Cell, groups: list[dict[str, Any]]) -> None:
        """Record the rates of groups with schedules of their own, where mindformers' monitor reads them."""
        self.has_grouped_rates = True
        self.default_rate = copy.deepcopy(default)
        self.group_rates = nn.CellList([copy.deepcopy(group["lr_scheduler"]) for group in groups])
        self.noted_rate = _registered("current_default_lr", ms.Tensor(0.0, ms.float32))
        self.noted_group_rates = _registered("current_grouped_lr", ms.Tensor([0.0] * len(groups), ms.float32))

    def rates(self):
        """The rate of this update that mindformers shows, the default or the last group's, and those of groups."""
        if self.has_grouped_rates:
            at = self.optimizer.global_step
            of_groups: tuple = ()
            for rate_of in self.group_rates:
                of_groups = (*of_groups, rate_of(at).reshape(()))
            return self.default_rate(at).reshape(()) + 0.0, ops.stack(of_groups) + 0.0
        rate = self.optimizer.get_lr()
        if isinstance(rate, (tuple, list)):
            rate = rate[-1]
        return rate.reshape(()) + 0.0, None

    def construct(self, *inputs):
        rate, of_groups = self.rates()  # before the update, which counts steps
        loss, overflow, scale = super().construct(ops.depend(inputs[0], rate), *inputs[1:])
        if self.has_grouped_rates:
            loss = ops.depend(loss, ops.assign(self.noted_rate, rate))
            loss = ops.depend(loss, ops.assign(self.noted_group_rates, of_groups))
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
    <https://www.mindspore.cn/mindformers/docs/en/master/index.html>`_ , in all parallel modes. In semi-auto and auto
    parallel mode it also takes the place of `MFPipelineWithLossScaleCell` and of the cell around the network that
    accumulates; give it the network itself.

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
        lr_scheduler (Cell, optional): The schedule of the other weights; only used with `grouped_lr_scheduler` .
            Default: ``None`` .
        grouped_lr_scheduler (list[dict], optional): The schedules of groups of weights, as the Trainer makes them,
            which the optimizer has, too. Then the learning rate that is returned is `lr_scheduler` 's. Default:
            ``None`` .
        **options (Any): Options of :class:`gaccum_ms.GradAccumulationCell` , such as ``accumulation_steps=4`` , for
            windows of several batches.

    Returns:
        TrainOneStepWithGradAccumulationCell. It returns the loss, whether the window overflowed, the scale, the
        learning rate, and the gradient's norm before clipping, or ``None`` if no option needs the norm.

    Raises:
        TypeError: If an argument is of a wrong type.
        ValueError: If an argument has a wrong value; if `local_norm` is given; in semi-auto and auto parallel mode, if
            a forward of the network changes Parameters that mindformers' callbacks read, as its experts' do.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``
    """
    check_left_out("local_norm", local_norm, "Norms of each rank's gradients are not there: all ranks reduce once.")
    check_positive_int(OWNER, "gradient_accumulation_steps", gradient_accumulation_steps)
    max_norm = clip_norm_of(use_clip_grad, "use_clip_grad", max_grad_norm)
    if use_skip_data_by_global_norm:
        clip = () if max_norm is None else (ClipByGlobalNorm(max_norm),)
        own = options.get("transforms", ())
        check_transforms(OWNER, "transforms", own)
        options["transforms"] = (SkipSpikes(norm=_just_below(global_norm_spike_threshold)), *clip, *own)
        max_norm = None
    if calculate_per_token_loss:
        options["reduction"] = "ratio"
    if options.get("micro_batch_size") is None:
        options.setdefault("micro_size", gradient_accumulation_steps)
    options.setdefault("accumulation_steps", 1)
    if compiler_distributes():
        _refuse_changing_forward(network)
        network = Backbone(network)
    step = build(
        Loss(network, bool(calculate_per_token_loss), _is_legacy()),
        optimizer,
        scale_of(scale_sense),
        StepOfMindformers,
        max_grad_norm=max_norm,
        **options,
    )
    step.judges = bool(use_skip_data_by_global_norm)
    if grouped_lr_scheduler is not None:
        step.note_rates(lr_scheduler, grouped_lr_scheduler)
    return step


def _refuse_changing_forward(network: nn.Cell) -> None:
    names = [each.name for each in network.get_parameters() if each.name.rsplit(".", 1)[-1] in _WRITTEN_BY_FORWARD]
    if names:
        raise ValueError(
            f"For '{OWNER}', in semi-auto and auto parallel mode the network must have no Parameter that its forward "
            f"changes and a callback of mindformers reads (expert_load, topk_bias, gbs_aux_loss, max_logits_val), "
            f"because it is not shown that each micro-batch changes it once, but got {first_of(names, 3)}. Switch that "
            f"option of the model off, or train it with mindformers' own step."
        )


def _registered(name: str, value: ms.Tensor) -> ms.Parameter:
    """A Parameter by which mindformers' step tells its callbacks something; the one of an earlier training, if any."""
    from mindformers.utils.parameter_register import parameter_register

    known = name in parameter_register.keys()  # noqa: SIM118 -- it is no dict
    return parameter_register.get(name) if known else parameter_register.register(name, value)


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
    Make mindformers' Trainer accumulate by our step, with the options of `runner_wrapper` in its configuration. Call it
    once, before training. If our step does not accumulate, mindformers' own trains.

    The number of micro-batches is `runner_config.gradient_accumulation_steps` ; in a pipeline, as in mindformers, it is
    `parallel_config.micro_batch_num` .

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


def _micro_batches(trainer: Any) -> int | None:
    """The number of micro-batches of our step; None if mindformers' own step trains."""
    mode = ms.get_auto_parallel_context("parallel_mode")
    if compiler_distributes() and stages() > 1:
        return trainer.config.parallel_config.micro_batch_num
    steps = trainer.config.runner_config.gradient_accumulation_steps
    is_number = isinstance(steps, int) and not isinstance(steps, bool)
    known = compiler_distributes() or mode in (ms.ParallelMode.STAND_ALONE, ms.ParallelMode.DATA_PARALLEL)
    return steps if known and is_number and steps > 1 else None


def _without_setting(original: Callable, trainer: Any, *args: Any) -> Any:
    """Call the method with `gradient_accumulation_steps` of 1."""
    runner = trainer.config.runner_config
    steps, runner.gradient_accumulation_steps = runner.gradient_accumulation_steps, 1
    try:
        return original(*args)
    finally:
        runner.gradient_accumulation_steps = steps


def _keep_setting(original: Callable, trainer: Any) -> None:
    if compiler_distributes() or _micro_batches(trainer) is None:
        return original()
    return _without_setting(original, trainer)


def _leave_unwrapped(original: Callable, trainer: Any, network: nn.Cell) -> nn.Cell:
    if _micro_batches(trainer) is None:
        return original(network)
    _refuse_parts_of_loss(trainer, network)
    if not compiler_distributes():
        return _without_setting(original, trainer, network)
    _check_settings(trainer)
    return network


def _refuse_parts_of_loss(trainer: Any, network: nn.Cell) -> None:
    """mindformers' monitor reads a loss's parts if the model has experts, or predicts several tokens."""
    from mindformers.wrapper.wrapper import get_real_models

    if trainer.config.print_separate_loss and not _is_legacy():
        model = get_real_models(network)
        if model.is_moe_model() or model.is_mtp_model():
            raise ValueError(
                f"For '{OWNER}', 'print_separate_loss' must be False for a model with experts or with several "
                f"predicted tokens, because our step does not record the loss's parts, but got True. Set it so: the "
                f"loss is their sum."
            )


def _check_settings(trainer: Any) -> None:
    """Refuse what mindformers would put around the network, or into its graph, in semi-auto mode."""
    config = trainer.config
    settings = (
        ("micro_batch_interleave_num", config.micro_batch_interleave_num or 1, 1),
        ("parallel_config.seq_split_num", config.parallel_config.seq_split_num or 1, 1),
    )
    for name, value, only in settings:
        if value != only:
            raise ValueError(
                f"For '{OWNER}', in semi-auto and auto parallel mode '{name}' must be {only}, because our step "
                f"cuts the batch itself, but got {value}. Set it so, or do not call use_in_trainer()."
            )
    if ms.get_auto_parallel_context("pipeline_scheduler") == "zero_bubble_v":
        raise ValueError(
            f"For '{OWNER}', 'pipeline_scheduler' must not be 'zero_bubble_v', for which the model returns other "
            f"losses. Use '1f1b'."
        )


def _wrap(original: Callable, trainer: Any, network: nn.Cell, optimizer: nn.Optimizer) -> nn.Cell:
    from mindformers.trainer.base_trainer import mf_get_context

    micro_batches = _micro_batches(trainer)
    if micro_batches is None:
        return original(network, optimizer)
    wrapper = trainer.config.runner_wrapper
    replaced = "MFPipelineWithLossScaleCell" if compiler_distributes() else "MFTrainOneStepCell"
    if wrapper is None or wrapper.type != replaced:
        raise ValueError(
            f"For '{OWNER}', 'runner_wrapper.type' must be '{replaced}', but got "
            f"{None if wrapper is None else wrapper.type!r}: our step takes its place. Give that type, or "
            f"gradient_accumulation_steps=1."
        )
    settings = dict(wrapper)
    wrapper.update(type=_WRAPPER, gradient_accumulation_steps=micro_batches)
    if compiler_distributes():
        wrapper.pop("micro_batch_num", None)
        wrapper.setdefault("use_clip_grad", True)  # the default of the step that is replaced
    try:
        step: StepOfMindformers = original(network, optimizer)
    finally:
        built = {name: wrapper[name] for name in ("scale_sense",) if name in settings}
        wrapper.clear()
        wrapper.update(settings | built)
    if compiler_distributes() and mf_get_context("dataset_broadcast_opt_level"):
        # The ranks that mindformers sends the same samples are neighbours, which its _VirtualDatasetCell tells.
        step.lay_inputs(trainer.wrap_eval_network_with_tool_cells(Inputs()))
    return step


def _leave_loss_undivided(original: Callable, trainer: Any, callbacks: list) -> list:
    """Stop mindformers' monitor from dividing the loss: other cells return a sum, but our step returns the mean."""
    from mindformers.core.callback import MFLossMonitor

    if _micro_batches(trainer) is not None:
        for callback in callbacks:
            if isinstance(callback, MFLossMonitor):
                callback.gradient_accumulation_steps = 1
                callback.mirco_size = 1  # mindformers' name for the micro-batches of a pipeline
    return original(callbacks)
