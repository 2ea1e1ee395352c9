"""MindSpore's newer optimizers, `mindspore.experimental.optim` and `mindspore.mint.optim` : refuses those that cannot
train, and lists the state that MindSpore does not list as Parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mindspore as ms
from mindspore import mint, nn
from mindspore.experimental.optim import Optimizer as ExperimentalOptimizer  # the base of mindspore.mint.optim's too

from gaccum_ms.backend.lent import is_lent_parameter, lend, lend_parameter
from gaccum_ms.backend.parameters import own

# On CPU, AdamW has no kernel (FusedAdamW cannot even be created). SGD silently writes nothing unless compiled; neither
# does Adam, but for MindSpore 2.8 and 2.9.
_COMPILED_ONLY: tuple[type, ...] = (mint.optim.SGD,)
if not ms.__version__.startswith(("2.8.", "2.9.")):
    _COMPILED_ONLY += (mint.optim.Adam,)

FIXED_RATE = "lr_float"  # a number that mint.optim.SGD uses instead of its Parameter

_SCHEDULER = own("scheduler.")
_GROUP_RATE = "learning_rate_group_"


def refuse_without_kernels(owner: str, optimizer: nn.Cell) -> None:
    """Refuse, before anything is built, an optimizer that cannot train on this device."""
    optimizer = without_shards(optimizer)
    if ms.get_context("device_target") != "CPU":
        return
    if isinstance(optimizer, mint.optim.SGD) and ms.__version__.startswith("2.7."):
        raise ValueError(
            f"For '{owner}', the optimizer must write its weights, but got mint.optim.SGD, which with MindSpore "
            f"{ms.__version__} writes none on CPU. Use nn.SGD, or MindSpore 2.8."
        )
    if isinstance(optimizer, mint.optim.AdamW):
        raise ValueError(
            f"For '{owner}', the optimizer must have kernels on this device, but got mint.optim.AdamW on CPU, for "
            f"which MindSpore {ms.__version__} has none. Use mindspore.experimental.optim.AdamW, or "
            f"nn.AdamWeightDecay."
        )


def refuse_uncompiled(owner: str, optimizer: nn.Cell) -> None:
    """Refuse, before a step runs eagerly, an optimizer that writes only when it is compiled."""
    optimizer = without_shards(optimizer)
    if ms.get_context("device_target") == "CPU" and isinstance(optimizer, _COMPILED_ONLY):
        name = type(optimizer).__name__
        raise RuntimeError(
            f"For '{owner}', the optimizer must write its weights, but got mint.optim.{name} in PyNative mode, in "
            f"which it writes none on CPU. Use jit=True or graph mode, or mindspore.experimental.optim.{name}."
        )


def settings_of(optimizer: nn.Cell) -> list[dict[str, Any]]:
    """The settings of each group, which a compiled update has as constants; not those of MindSpore's other optimizers,
    which have no such groups."""
    optimizer = without_shards(optimizer)
    groups = optimizer.param_groups if isinstance(optimizer, ExperimentalOptimizer) else []
    return [{name: value for name, value in group.items() if name != "params"} for group in groups]


def refuse_changed_settings(owner: str, optimizer: nn.Cell, compiled: list[dict[str, Any]]) -> None:
    """Refuse settings that differ from those that a graph was compiled with: it would go on with the old ones."""
    for number, (old, new) in enumerate(zip(compiled, settings_of(optimizer), strict=False)):
        for name, value in old.items():
            if not _is_same(value, new.get(name)):
                raise RuntimeError(
                    f"For '{owner}', the settings of the optimizer's groups must stay as they were when the update was "
                    f"compiled, but got optimizer.param_groups[{number}][{name!r}] = {new.get(name)!r} instead of "
                    f"{value!r}. Nothing was trained. Write a rate into its Parameter, by mindspore.ops.assign(group"
                    f"['lr'], rate); or, in PyNative mode, compile nothing, with jit=False."
                )


def _is_same(old: Any, new: Any) -> bool:
    return new is old or (not isinstance(old, ms.Tensor) and not isinstance(new, ms.Tensor) and bool(new == old))


def refuse_fixed_rates(owner: str, optimizer: ExperimentalOptimizer) -> None:
    """Refuse an optimizer that ignores what is written into its rates."""
    if any(FIXED_RATE in group for group in optimizer.param_groups):
        raise ValueError(
            f"For '{owner}', the optimizer must read its learning rate at each update, but got a "
            f"mindspore.mint.optim.SGD, which uses the number that it was made with. Use nn.SGD, or leave the rate as "
            f"it is."
        )


def without_shards(optimizer: Any) -> Any:
    """The inner optimizer of a ShardedOptimizer; any other optimizer itself."""
    hidden = optimizer.__dict__.get("_hidden")
    return hidden[0] if hidden else optimizer


def list_rates(owner: Any, optimizer: nn.Cell) -> None:
    """While the owner lives, list an optimizer's group rates, and AMSGrad's state, among its Parameters, so that
    checkpoints hold rates that a scheduler has changed."""
    optimizer = without_shards(optimizer)
    if not isinstance(optimizer, ExperimentalOptimizer):
        return
    listed = {id(each) for each in optimizer.get_parameters() if not is_lent_parameter(optimizer, each.name)}
    for value in [value for group in optimizer.param_groups for value in group.values()]:
        for state in _parameters_in(value):
            if id(state) not in listed:
                lend_parameter(owner, optimizer, state)


def list_schedulers(owner: Any, optimizer: nn.Cell, schedulers: Iterable[Any], updates: ms.Parameter) -> None:
    """The same for the schedulers' own state, and for their number of updates. While the owner lives the names are
    ours, because MindSpore gives several schedulers the same names."""
    lend_parameter(owner, optimizer, updates)
    for number, scheduler in enumerate(with_inner(schedulers)):
        rates = {id(rate) for rate in _rates_of(optimizer)}
        for name, value in vars(scheduler).items():
            if isinstance(value, ms.Parameter) and id(value) not in rates:
                lend(owner, value, "name", f"{_SCHEDULER}{number}.{name}")
                lend(owner, value, "requires_grad", False)
                lend_parameter(owner, optimizer, value)


def state_of_schedulers(schedulers: Iterable[Any]) -> list[ms.Parameter]:
    """All that their ``step()`` may write: their own Parameters, and the rates."""
    inner = with_inner(schedulers)
    own_state = [value for scheduler in inner for value in vars(scheduler).values() if isinstance(value, ms.Parameter)]
    return own_state + _rates_of(inner[0].optimizer)


def is_of_scheduler(name: str) -> bool:
    """Whether a checkpoint's value is a scheduler's state."""
    return name.startswith(_SCHEDULER)


def is_rate(name: str) -> bool:
    """Whether a Parameter of an optimizer is a learning rate, and not a factor that callbacks change."""
    return name == "learning_rate" or name.startswith(_GROUP_RATE)


def may_lack(name: str) -> bool:
    """Whether a checkpoint may lack this Parameter of an optimizer: it may be from before the Parameter was listed, or
    from a training without scheduler."""
    return is_of_scheduler(name) or name.startswith((_GROUP_RATE, "max_exp_avg_sq."))


def _parameters_in(value: Any) -> list[ms.Parameter]:
    if isinstance(value, ms.Parameter):
        return [value]
    return [entry for entry in value if isinstance(entry, ms.Parameter)] if isinstance(value, ms.ParameterTuple) else []


def _rates_of(optimizer: ExperimentalOptimizer) -> list[ms.Parameter]:
    return [rate for group in optimizer.param_groups for rate in _parameters_in(group["lr"])]


def with_inner(schedulers: Iterable[Any]) -> list[Any]:
    """Schedulers, and the schedulers inside them, as in SequentialLR."""
    return [scheduler for outer in schedulers for scheduler in (outer, *with_inner(getattr(outer, "_schedulers", ())))]
