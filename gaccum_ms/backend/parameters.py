"""Parameters in which a compiled step keeps numbers: for callbacks to read, and for checkpoints to hold.

Also how a Parameter is written, in a graph and outside of one, and how a Cell holds weights that are not its own.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from gaccum_ms.backend import no_grad

# Before every name, because MindSpore keeps a checkpoint's values by name alone: a weight that the user has named
# `update_count` , say, and a record of that name would overwrite each other. Accumulators have prefixes of their own.
PREFIX = "gaccum_ms."

# Each rank has its own: `layerwise_parallel` is MindSpore's word for Parameters that ``parameter_broadcast`` must not
# overwrite with those of rank 0.


def own(name: str) -> str:
    """The name of a Parameter of ours, as checkpoints have it."""
    return PREFIX + name


def record(name: str, shape: tuple[int, ...] = (), value: float = 0.0) -> ms.Parameter:
    """A float32 number, or several."""
    return of_this_rank(own(name), ms.Tensor(np.full(shape, value, np.float32)))


def counter(name: str, value: int = 0) -> ms.Parameter:
    """An int32 number, shape ``()``."""
    return of_this_rank(own(name), ms.Tensor(value, ms.int32))


def of_this_rank(name: str, value: ms.Tensor) -> ms.Parameter:
    """A Parameter that is not trained, and not broadcast."""
    return ms.Parameter(value, name=name, requires_grad=False, layerwise_parallel=True)


# What callbacks read, and what a step or accumulator has under its own name, whichever of its parts keeps it.
_SHOWN = (
    "accumulation_steps",
    "batch_items",
    "dropped_micro_batches",
    "grad_norm",
    "judged_norm",
    "loss_terms",
    "noise_sums",
    "scale_sense",
    "skipped_updates",
    "update_count",
    "window_batches",
    "window_count",
    "window_loss",
    "window_steps",
)


def show_records(cell: nn.Cell, *parts: nn.Cell | None) -> None:
    """Give `cell` the Parameters of its parts that are meant to be read, as attributes of its own."""
    for part in parts:
        for name in _SHOWN:
            if hasattr(part, name):
                setattr(cell, name, getattr(part, name))


def hold_weights(cell: nn.Cell, weights: ms.ParameterTuple) -> None:
    """Give a cell of ours its ``weights`` , as an attribute only. MindSpore would make them Parameters of the cell, by
    their own names: a weight that the user has named `scale` would be refused where the cell has such an attribute."""
    for weight in weights:
        cell._params.pop(weight.name, None)
    object.__setattr__(cell, "weights", weights)


@ops.constexpr
def on_cpu():
    """Whether graphs run there, where some kernels are missing and others slow."""
    return ms.get_context("device_target") == "CPU"


def overwrite(parameter: ms.Parameter, value: ms.Tensor) -> None:
    """Assign outside of a graph. PyNative's tape, left open by a gradient that raised, would forbid it."""
    with no_grad():
        write(parameter, value)


def write(parameter: ms.Parameter, value: ms.Tensor) -> ms.Tensor:
    """Assign in a graph; returns what stands for its being done."""
    if on_cpu() and parameter.dtype == ms.bfloat16:
        return parameter.copy_(value)  # MindSpore has no bfloat16 Assign there, and on GPU no such copy
    return ops.assign(parameter, value)
