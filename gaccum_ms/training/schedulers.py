"""MindSpore's schedulers of experimental optimizers, stepped once per update, with their state in checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore.experimental.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR

from gaccum_ms.backend import no_grad
from gaccum_ms.backend.newer_optimizers import (
    list_schedulers,
    refuse_fixed_rates,
    state_of_schedulers,
    with_inner,
    without_shards,
)
from gaccum_ms.backend.parameters import counter, overwrite


class Schedulers:
    """Schedulers of one optimizer, whose state is listed in checkpoints while this object lives. `owner` , `name` : the
    class and its argument, in errors."""

    def __init__(self, owner: str, name: str, schedulers: Sequence[Any]) -> None:
        if not schedulers or not all(isinstance(scheduler, (LRScheduler, SequentialLR)) for scheduler in schedulers):
            kinds = [type(scheduler).__name__ for scheduler in schedulers]
            metric = any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in schedulers)
            remedy = " ReduceLROnPlateau needs a metric: call its step() yourself, after evaluation." if metric else ""
            raise TypeError(
                f"For '{owner}', the argument '{name}' must be LRSchedulers of "
                f"mindspore.experimental.optim.lr_scheduler, but got {kinds}.{remedy}"
            )
        self._owner, self._name, self._schedulers = owner, name, schedulers
        self.optimizer = schedulers[0].optimizer
        if any(scheduler.optimizer is not self.optimizer for scheduler in schedulers):
            raise ValueError(
                f"For '{owner}', the argument '{name}' must be of one optimizer, but got schedulers of several."
            )
        refuse_fixed_rates(owner, self.optimizer)
        self._refuse_state_outside_of_parameters()
        # Updates for which the schedulers were stepped; -1 before the first training.
        self.updates = counter("scheduler.updates", -1)
        list_schedulers(self, self.optimizer, schedulers, self.updates)

    def check_optimizer(self, optimizer: Any, trained_with: str) -> None:
        """Refuse schedulers of another optimizer than the one that is `trained_with` ."""
        if without_shards(optimizer) is not self.optimizer:
            raise ValueError(
                f"For '{self._owner}', the argument '{self._name}' must be of the optimizer that {trained_with}, but "
                f"got schedulers of another '{type(self.optimizer).__name__}'."
            )

    def follow(self, updates: int) -> None:
        """Step for each of these updates that was made since the last call; the first call begins to count them."""
        followed = int(self.updates.asnumpy())
        if followed < 0:
            followed = updates
            overwrite(self.updates, ms.Tensor(updates, ms.int32))
        for update in range(followed, updates):
            self._step()
            overwrite(self.updates, ms.Tensor(update + 1, ms.int32))

    def _step(self) -> None:
        with no_grad():
            for scheduler in self._schedulers:
                scheduler.step()

    def _refuse_state_outside_of_parameters(self) -> None:
        """Step on trial: what that changes must be in Parameters, which checkpoints hold."""
        values_before = [(parameter, parameter.asnumpy().copy()) for parameter in state_of_schedulers(self._schedulers)]
        before = [_outside_of_parameters(scheduler) for scheduler in with_inner(self._schedulers)]
        self._step()
        for scheduler, values in zip(with_inner(self._schedulers), before, strict=True):
            after = _outside_of_parameters(scheduler)
            changed = sorted(name for name in after if name not in values or after[name] != values[name])
            if changed:
                raise ValueError(
                    f"For '{self._owner}', the argument '{self._name}' must keep its state in Parameters, which "
                    f"checkpoints hold, but got '{type(scheduler).__name__}', whose step() changes its attribute "
                    f"'{changed[0]}'. Make it a Parameter, or call step() yourself."
                )
        for parameter, value in values_before:
            overwrite(parameter, ms.Tensor(value, parameter.dtype))


def _outside_of_parameters(scheduler: Any) -> dict[str, Any]:
    """The attributes that are plain values; of a Tensor, which object it is."""
    values = {name: value for name, value in vars(scheduler).items() if not isinstance(value, ms.Parameter)}
    tensors = {name: id(value) for name, value in values.items() if isinstance(value, ms.Tensor)}
    return {name: copy.deepcopy(value) for name, value in values.items() if _is_plain(value)} | tensors


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
