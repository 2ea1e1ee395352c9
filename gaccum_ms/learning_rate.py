"""The learning rate of a window: scaled with its size, warmed up, read and multiplied during training."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.experimental.optim import Optimizer as ExperimentalOptimizer  # the base of mindspore.mint.optim's too
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

from gaccum_ms.backend.newer_optimizers import FIXED_RATE, refuse_fixed_rates, without_shards
from gaccum_ms.backend.parameters import overwrite, state_parameter
from gaccum_ms.checks.arguments import check_finite, check_not_negative_int, check_one_of, check_positive_finite

RULES = ("linear", "sqrt")
_ENDING = (nn.CosineDecayLR, nn.PolynomialDecayLR)  # schedules that end after `decay_steps`

_OWNER = "scale_learning_rate"

# Names are numbered, because grouped weights may have a schedule each: `ms.jit` refuses two Parameters of one name, and
# a step would rename the whole optimizer's state.
MULTIPLIER_PREFIX = "learning_rate_multiplier."
_schedules = itertools.count(1)


def scaling_factor(ratio: float, rule: str) -> float:
    """The factor of the rate when the batch becomes `ratio` times as large."""
    if rule == "none":
        return 1.0
    return ratio if rule == "linear" else math.sqrt(ratio)


def scale_learning_rate(
    learning_rate: float | Sequence[float] | ms.Tensor | LearningRateSchedule,
    factor: float,
    rule: str = "linear",
    warmup_updates: int = 0,
    per: str = "update",
) -> float | list[float] | LearningRateSchedule:
    r"""
    Scale a learning rate for a batch that is `factor` times as large.

    Accumulation makes the batch of an update larger: `factor` is `accumulation_steps` , or the new batch's samples over
    the old one's. With :math:`u` the number of updates made, :math:`\eta(u)` the given rate, :math:`w` the
    `warmup_updates` , and :math:`s` the `factor` or its square root, the rate becomes

    .. math::
        \eta(u) \, \left(1 + (s - 1) \min(u / w, 1)\right)

    and :math:`\eta(u) s` without warm-up. The linear rule and the gradual warm-up are from Goyal et al., `Accurate,
    Large Minibatch SGD <https://arxiv.org/abs/1706.02677>`_ (2017), who used SGD with momentum and a warm-up of
    five epochs; the square root is from Krizhevsky, `One weird trick for parallelizing convolutional neural networks
    <https://arxiv.org/abs/1404.5997>`_ (2014).

    Note:
        The optimizer counts updates, in its `global_step` . With `accumulation_steps` of 4, 1,000 batches make 250
        updates. ``per="batch"`` converts a list or schedule for the 1,000 batches: update :math:`u` then has the rate
        of batch :math:`4 u` , the first of its window. ``Model.train`` warns if there are as many rates as batches. If
        `FlushAccumulation` ends windows early, an epoch has more updates than its batches divided by `factor` : convert
        the list of each epoch separately, and join the results.

        If one group of parameters has a list or schedule, MindSpore adds 1 to the plain numbers of the others and
        subtracts it again, which turns 1e-5 into 1.00136e-5 and 1e-8 into 0. Small rates should then be schedules too:
        ``scale_learning_rate(1e-5, 1, warmup_updates=1)`` is exactly 1e-5.

    Args:
        learning_rate (Union[float, list[float], tuple[float], Tensor, LearningRateSchedule]): The rate before scaling,
            at least 0: one number; one for each update, as a list, tuple, 1-D Tensor or array; or a schedule such as
            `nn.CosineDecayLR` .
        factor (float): The ratio of the new to the old batch size, positive, without unit.
        rule (str): ``"linear"`` multiplies by `factor` , ``"sqrt"`` by its square root, ``"none"`` not at all.
            Default: ``"linear"`` .
        warmup_updates (int): Number of updates in which the rate grows from the unscaled to the scaled one.
            Default: ``0`` , scaled from the first update on.
        per (str): Whether a list or schedule has a rate for each ``"update"`` or for each ``"batch"`` ; with
            ``"batch"`` , `factor` is the whole number of batches that share an update. Default: ``"update"`` .

    Returns:
        A `learning_rate` for a `nn.Optimizer` , also as ``"lr"`` of grouped parameters. A float for a number
        without warm-up. A list for rates per update. A LearningRateSchedule for a schedule, and for a number with
        warm-up; all optimizers except `nn.FTRL` accept schedules. The schedule holds one Parameter,
        ``learning_rate_multiplier.<n>`` , 1 until the rate is multiplied during training; `n` counts the
        process's schedules, so that a checkpoint fits if a script creates them in the same order again.

    Raises:
        TypeError: If an argument has another type than above. A bool is not a number.
        ValueError: If a learning rate is negative or not finite; if `learning_rate` has no entries; if `factor` is not
            positive and finite, or with ``per="batch"`` no whole number; if `rule` or `per` is another word; if
            `warmup_updates` is negative.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import Tensor, nn
        >>> from gaccum_ms import scale_learning_rate
        >>> scale_learning_rate(0.125, 4)
        0.5
        >>> scale_learning_rate([0.5, 0.5, 0.5, 0.25], 4, rule="sqrt", warmup_updates=2)
        [0.5, 0.75, 1.0, 0.5]
        >>> scale_learning_rate([0.8, 0.7, 0.6, 0.5, 0.4], 2, rule="none", per="batch")
        [0.8, 0.6, 0.4]
        >>> schedule = scale_learning_rate(nn.CosineDecayLR(0.0, 0.5, 8), 4, warmup_updates=4)
        >>> print([round(float(schedule(Tensor(update)).asnumpy()), 3) for update in (0, 2, 4, 8)])
        [0.5, 1.067, 1.0, 0.0]
        >>> optimizer = nn.Momentum(nn.Dense(3, 2).trainable_params(), schedule, momentum=0.9)
    """
    rate = _checked_rate(learning_rate)
    check_positive_finite(_OWNER, "factor", factor)
    check_one_of(_OWNER, "rule", rule, (*RULES, "none"))
    check_one_of(_OWNER, "per", per, ("update", "batch"))
    if per == "batch" and factor != int(factor):
        raise ValueError(
            f"For '{_OWNER}', the argument 'factor' must be a whole number with per='batch', because it is the number "
            f"of batches that share an update, but got {factor}."
        )
    check_not_negative_int(_OWNER, "warmup_updates", warmup_updates)
    scale = scaling_factor(float(factor), rule)
    batches = int(factor) if per == "batch" else 1
    if isinstance(rate, list):
        rate = rate[::batches]
        warmed = [min(update / warmup_updates, 1.0) if warmup_updates else 1.0 for update in range(len(rate))]
        return [each_rate * (1 - grown + scale * grown) for each_rate, grown in zip(rate, warmed, strict=True)]
    if isinstance(rate, float) and not warmup_updates:
        return rate * scale
    return ScaledLearningRate(rate, scale, warmup_updates, batches)


class ScaledLearningRate(LearningRateSchedule):
    """A rate or schedule, times a factor that grows from 1 to `scale` , times the factors of `multiply_learning_rate` .
    The schedule's steps are batches; `batches` of them share an update.

    The last factor is a Parameter, so that a compiled step sees its changes; a number would be a constant.
    """

    def __init__(self, base: float | LearningRateSchedule, scale: float, warmup_updates: int, batches: int) -> None:
        super().__init__()
        self.base: Any = base
        self.base_is_schedule = isinstance(base, LearningRateSchedule)
        self.scale = scale
        self.warmup_updates = warmup_updates
        self.batches = batches
        self.multiplier = state_parameter(f"{MULTIPLIER_PREFIX}{next(_schedules)}", value=1.0)

    def construct(self, global_step):
        rate = self.base(global_step * self.batches) if self.base_is_schedule else self.base
        scale = self.scale
        if self.warmup_updates > 0:
            grown = ops.minimum(ops.cast(global_step, ms.float32) / self.warmup_updates, 1.0)
            scale = 1 - grown + scale * grown  # not 1 + (scale - 1) * grown, which rounds if grown is 1
        return rate * scale * self.multiplier


def current_learning_rate(optimizer: nn.Optimizer, updates_ago: int = 0) -> float:
    """The rate of the optimizer's next update, or that of `updates_ago` updates ago, if it was not changed since. NaN
    if a list of rates has ended: the next update will then fail. If groups have separate rates, it is the rate of the
    first parameter's group, which is the first group unless "order_params" is given."""
    optimizer = _with_rate(optimizer)
    if isinstance(optimizer, ExperimentalOptimizer):
        group = optimizer.param_groups[0]
        return float(group.get(FIXED_RATE, group["lr"]))
    step = optimizer.global_step.asnumpy() - updates_ago
    rate_parameter = optimizer.get_lr_parameter(optimizer.parameters[0])
    if _is_list(rate_parameter) and step[0] >= rate_parameter.size:
        return math.nan
    rate = optimizer.learning_rate[0] if optimizer.is_group_lr else optimizer.learning_rate
    if isinstance(rate, nn.Cell):
        rate = rate(ms.Tensor(step))  # a copy, because graph mode takes no Parameter as an input
    return rate.asnumpy().item()


def updates_of_rates(optimizer: nn.Optimizer) -> int | None:
    """The number of updates for which the optimizer has rates: entries of its longest list, or steps of its longest
    schedule. None if no rate ends."""
    optimizer = _with_rate(optimizer)
    if isinstance(optimizer, ExperimentalOptimizer):
        return None
    rates = optimizer.get_lr_parameter(list(optimizer.parameters))
    return max((_updates_of(rate) for rate in rates), default=0) or None


def _updates_of(rate: Any) -> int:
    """The same for one rate; 0 if it does not end."""
    if isinstance(rate, ScaledLearningRate):
        return -(-_updates_of(rate.base) // rate.batches)
    if isinstance(rate, nn.Cell):  # a user's schedule may hold another
        ends = (cell.decay_steps for _, cell in rate.cells_and_names() if isinstance(cell, _ENDING))
        return max(ends, default=0)
    return rate.size if _is_list(rate) else 0


def multiply_learning_rate(optimizer: nn.Optimizer, factor: float) -> None:
    """Multiply the rate of all later updates, of all groups, or raise before anything changes. A compiled step sees the
    change. No other state of the optimizer changes. nn.Rprop keeps the state that it derived from its first rate;
    nn.ASGD reacts one update late, as with any change of its rate."""
    optimizer = _with_rate(optimizer)
    if isinstance(optimizer, ExperimentalOptimizer):
        refuse_fixed_rates("multiply_learning_rate", optimizer)
        rates = [group["lr"] for group in optimizer.param_groups]
    else:
        rates = optimizer.get_lr_parameter(list(optimizer.parameters))
    # Groups without a separate rate share one Parameter.
    multipliers = {id(rate): rate for rate in rates}
    for parameter in [_multiplier(rate) for rate in multipliers.values()]:
        overwrite(parameter, ms.Tensor(parameter.asnumpy() * factor, parameter.dtype))


def _multiplier(rate: ms.Parameter | LearningRateSchedule) -> ms.Parameter:
    """The Parameter to which a rate is proportional. MindSpore's numbers and lists have one, its schedules do not."""
    if isinstance(rate, ScaledLearningRate):
        return rate.multiplier
    if isinstance(rate, ms.Parameter):
        return rate
    raise ValueError(
        f"For 'multiply_learning_rate', the optimizer's learning rate must be a number, a list, or a schedule made by "
        f"'scale_learning_rate', but got the schedule '{type(rate).__name__}', which cannot be changed while training "
        f"goes on. Give the optimizer scale_learning_rate(schedule, 1) instead."
    )


def _is_list(rate: ms.Parameter | LearningRateSchedule) -> bool:
    return isinstance(rate, ms.Parameter) and rate.ndim == 1


def _with_rate(optimizer: Any) -> nn.Optimizer:
    """The optimizer with the rate: nn.LARS and others hold another optimizer, and their `learning_rate` is unused."""
    while isinstance(inner := getattr(optimizer, "opt", None), nn.Optimizer):
        optimizer = inner
    newer = without_shards(optimizer)  # a sharded nn.Optimizer has each weight's rate itself
    return newer if isinstance(newer, ExperimentalOptimizer) else optimizer


def _checked_rate(learning_rate: Any) -> float | list[float] | LearningRateSchedule:
    """The rate as one of the three kinds that are scaled."""
    if isinstance(learning_rate, LearningRateSchedule):
        return learning_rate
    if isinstance(learning_rate, (ms.Tensor, np.ndarray)):
        learning_rate = learning_rate.tolist()
    if not isinstance(learning_rate, (list, tuple)):
        kinds = "a float, a list, tuple or 1-D Tensor of floats, or a LearningRateSchedule"
        check_finite(_OWNER, "learning_rate", learning_rate, 0, kinds)
        return float(learning_rate)
    if not learning_rate:
        raise ValueError(
            f"For '{_OWNER}', the argument 'learning_rate' must have a rate for each update, but got none."
        )
    for index, rate in enumerate(learning_rate):
        check_finite(_OWNER, f"learning_rate[{index}]", rate, 0)
    return [float(rate) for rate in learning_rate]
