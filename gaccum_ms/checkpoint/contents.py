"""What a checkpoint must contain for a step to resume from it: its weights, its optimizer's state, and an open window.

A file may be another network's, or have lost its end. Then nothing must be loaded: a step that goes on with a part of
its state is silently wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore import nn

from gaccum_ms.accumulation.accumulators import COMPENSATION_PREFIX, PREFIX
from gaccum_ms.backend.newer_optimizers import may_lack
from gaccum_ms.backend.parameters import own
from gaccum_ms.backend.user_warnings import warn_user
from gaccum_ms.checkpoint.rank_files import Values
from gaccum_ms.checks.arguments import first_of
from gaccum_ms.record.run_record import OF_DATA_SET, RULES

_OF_A_WINDOW = (own("window_unit"), own("window_sums"))


def without_optimizer(step: Any, values: Values) -> Values:
    """The values without the optimizer's state, its learning rate among it."""
    left_out = {*_state_of(step.optimizer, step.weights), own("rate_steps")}  # the steps are those of the rate
    return {name: value for name, value in values.items() if name not in left_out}


def check_contents(step: Any, path: Path, values: Values, optimizer: bool) -> None:
    """Raise a ValueError, before anything is loaded, if a step cannot go on from these values. `optimizer` : whether
    they must have the optimizer's state."""
    ours = own("batch_count") in values
    network = step.network.get_parameters() if isinstance(step, nn.TrainOneStepCell) else ()
    state = {name for name in _state_of(step.optimizer, step.weights) if optimizer and not may_lack(name)}
    needed = {parameter.name for parameter in (*step.weights, *network)}
    if missing := (needed | state if ours else needed) - values.keys():
        raise ValueError(
            f"For 'resume', the checkpoint must have all parameters of the network and the optimizer's state, but got "
            f"'{path}' without {_listed(missing)}."
            + " Give optimizer=False to go on without the optimizer's state."
            * missing.issubset(state)
        )
    # The run's record is the last in a file, so that one that was cut between two Parameters lacks some of it.
    records = {parameter.name for parameter in step.run_record.get_parameters()} - OF_DATA_SET
    records |= _of_window(step, path, values)
    if missing := records - values.keys() if ours else set():
        raise ValueError(
            f"For 'resume', a checkpoint of a step of gaccum_ms must have the step's counts and the open window's "
            f"sums, but got '{path}' without {_listed(missing)}. It is damaged, or only a part was saved."
        )
    missing_state = state - values.keys()
    if state and missing_state == state:
        raise ValueError(
            f"For 'resume', the checkpoint must have the optimizer's state, but got '{path}' with weights alone: the "
            f"optimizer would begin anew. For a new training from these weights, use "
            f"mindspore.load_param_into_net(network, mindspore.load_checkpoint(file)). To go on without the "
            f"optimizer's state, give optimizer=False."
        )
    if missing_state:
        warn_user(
            f"For 'resume', '{path}' has no {_listed(missing_state)} of the optimizer's state, which stay as they are."
        )
    _check_forms(step, path, values)


def _check_forms(step: nn.Cell, path: Path, values: Values) -> None:
    """Check the shapes, and the kinds of numbers: another kind is a damaged file's."""
    for parameter in step.get_parameters():
        value = values.get(parameter.name)
        if value is None:
            continue
        if value.shape != parameter.shape:
            raise ValueError(
                f"For 'resume', a parameter must have the shape that it has in the checkpoint, but got "
                f"{parameter.name} of shape {parameter.shape}, and {value.shape} in '{path}'."
            )
        if _kind(value.dtype) != _kind(parameter.dtype):
            raise ValueError(
                f"For 'resume', a parameter must have the kind of numbers that it has in the checkpoint, but got "
                f"{parameter.name} of {parameter.dtype}, and {value.dtype} in '{path}'."
            )


def _kind(dtype: Any) -> str:
    return str(dtype).lower().rstrip("0123456789_").replace("bfloat", "float")


def _of_window(step: Any, path: Path, values: Values) -> set[str]:
    """The names of an open window's Parameters that a file must have; none if its window is empty."""
    if not values.get(own("window_position")):
        return {own("window_position"), own("update_count")}
    rule = int(values.get(own("window_rule"), 0))
    if rule < 0:
        raise ValueError(f"For 'resume', 'window_rule' must not be negative, but got {rule} in '{path}'.")
    if rule >= len(RULES) or not step.run_record.resumes_windows:
        return set()  # an earlier version's sharded sums, or a window in semi-auto mode: the run's record refuses both
    prefixes = [PREFIX]
    if any(name.startswith(COMPENSATION_PREFIX) for name in values):  # optional, but all or none
        prefixes.append(COMPENSATION_PREFIX)
    # Accumulators have the names that the weights had when the step was built.
    names = [accumulator.name.partition(".")[2] for accumulator in step.accu_grads]
    names = names or [weight.name for weight in step.weights]
    return {*_OF_A_WINDOW, *(prefix + name for prefix in prefixes for name in names)}


def _state_of(optimizer: nn.Cell, weights: Iterable[ms.Parameter]) -> set[str]:
    """The names of an optimizer's Parameters that are no weights."""
    return {parameter.name for parameter in optimizer.get_parameters()} - {weight.name for weight in weights}


def _listed(names: Iterable[str]) -> str:
    return first_of(sorted(names), 5)
