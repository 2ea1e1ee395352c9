"""The user's options: checked, and completed by what follows from them."""

from __future__ import annotations

import dataclasses
from typing import Any

from gaccum_ms.checks.arguments import check_bool, check_one_of
from gaccum_ms.options.options import Options, check_each

_NAME = "GradAccumulationCell"


def checked(options: Options) -> Options:
    """The options of a cell. compatibility.py decides which of them go together."""
    check_each(_NAME, options)
    return dataclasses.replace(
        options,
        micro_size=_micro_size(options),
        accumulation_steps=options.accumulation_steps or 1,
        transforms=tuple(options.transforms),
        loss_weights=_loss_weights(options),
    )


def accumulator_options(**values: Any) -> Options:
    """The checked options of a `GradAccumulator` ."""
    owner = "GradAccumulator"
    if values["reduction"] is not None:
        check_one_of(owner, "reduction", values["reduction"], ("mean", "sum"))
    check_bool(owner, "jit", values["jit"])
    options = Options(loss_weights=(1.0,), **values)
    check_each(owner, options)
    return dataclasses.replace(options, transforms=tuple(options.transforms))


def _micro_size(options: Options) -> int | None:
    """The number of micro-batches; None: another option decides."""
    micro_size, micro_batch_size = options.micro_size, options.micro_batch_size
    if options.splits_in_python:
        if micro_size is not None or micro_batch_size is not None:
            raise ValueError(
                f"For '{_NAME}', with a function as 'split', which makes the micro-batches, neither 'micro_size' nor "
                f"'micro_batch_size' must be given, but got micro_size={micro_size} and "
                f"micro_batch_size={micro_batch_size}. Leave both out, or the function."
            )
        return None
    if micro_size is None and micro_batch_size is None and options.accumulation_steps is not None:
        micro_size = 1
    if (micro_size is None) == (micro_batch_size is None):
        raise ValueError(
            f"For '{_NAME}', exactly one of 'micro_size' (number of micro-batches) and 'micro_batch_size' (samples in "
            f"one) must be given, or neither with 'accumulation_steps' (batches that share an update), but got "
            f"micro_size={options.micro_size}, micro_batch_size={options.micro_batch_size} and "
            f"accumulation_steps={options.accumulation_steps}."
        )
    return micro_size


def _loss_weights(options: Options) -> tuple[float, ...]:
    """One weight for each loss of the network."""
    count: Any = options.count
    number = len(count) if isinstance(count, (tuple, list)) else 1
    if options.loss_weights is None:
        return (1.0,) * number
    if count is not None and number != len(options.loss_weights):
        raise ValueError(
            f"For '{_NAME}', 'count' and 'loss_weights' must have one entry for each loss, but got {number} count(s) "
            f"and {len(options.loss_weights)} weight(s)."
        )
    return tuple(float(weight) for weight in options.loss_weights)
