"""Parameters in which a compiled step keeps numbers: for callbacks to read, and for checkpoints to hold."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import nn

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
    "loss_terms",
    "noise_sums",
    "scale_sense",
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
