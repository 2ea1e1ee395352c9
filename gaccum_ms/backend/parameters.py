"""Parameters in which a compiled step keeps numbers, for callbacks and checkpoints.

Also: writing a Parameter, in a graph and outside of one, and holding weights in a Cell that does not own them.
"""

from __future__ import annotations

from collections.abc import Mapping

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from gaccum_ms.backend import no_grad

# The prefix of every name. MindSpore finds a checkpoint's values only by name: without it, a user's weight named
# `update_count` and our record of that name would overwrite each other. Accumulators have their own prefixes.
PREFIX = "gaccum_ms."

# Each rank has its own values: `layerwise_parallel` excludes them from ``parameter_broadcast`` .


def own(name: str) -> str:
    """The name of our Parameter in checkpoints."""
    return PREFIX + name


def state_parameter(name: str, shape: tuple[int, ...] = (), value: float = 0.0) -> ms.Parameter:
    """A float32 Parameter, one number or several."""
    return of_this_rank(own(name), ms.Tensor(np.full(shape, value, np.float32)))


def counter(name: str, value: int = 0) -> ms.Parameter:
    """An int32 Parameter of shape ``()`` ."""
    return of_this_rank(own(name), ms.Tensor(value, ms.int32))


def of_this_rank(name: str, value: ms.Tensor) -> ms.Parameter:
    """A Parameter that is neither trained nor broadcast."""
    return ms.Parameter(value, name=name, requires_grad=False, layerwise_parallel=True)


# Records that callbacks read as attributes of the step or accumulator, though one of its parts owns them.
_EXPOSED = (
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


def expose_records(cell: nn.Cell, *parts: nn.Cell | None) -> None:
    """Make the `_EXPOSED` Parameters of the parts attributes of `cell` ."""
    for part in parts:
        for name in _EXPOSED:
            if hasattr(part, name):
                setattr(cell, name, getattr(part, name))


def hold_weights(cell: nn.Cell, weights: ms.ParameterTuple) -> None:
    """Give a cell of ours its ``weights`` , only as an attribute. MindSpore would make them Parameters of the cell,
    under their own names, and refuse a user's weight named `scale` if the cell has an attribute of that name."""
    for weight in weights:
        cell._params.pop(weight.name, None)
    object.__setattr__(cell, "weights", weights)


def with_places_of_mindspore(weights: Mapping[str, ms.Parameter], children: Mapping[str, nn.Cell]) -> nn.Cell:
    """A Cell with the Parameters of MindSpore's own step, at the same places. `weights` : by their names when the step
    was built; they are Parameters of the step itself."""
    step = nn.Cell(auto_prefix=False)
    step._params.update(weights)
    step._cells.update(children)
    return step


@ops.constexpr
def on_cpu():
    """Whether graphs run on CPU, where some kernels are missing and others are slow."""
    return ms.get_context("device_target") == "CPU"


def overwrite(parameter: ms.Parameter, value: ms.Tensor) -> None:
    """Assign outside of a graph, also if a gradient that raised has left PyNative's tape open."""
    if not _written_in_place(parameter, value):
        with no_grad():
            write(parameter, value)


def _written_in_place(parameter: ms.Parameter, value: ms.Tensor) -> bool:
    """Write by NumPy, where its array is the Parameter's storage, as on CPU. Each `ops.assign` that Python runs loses
    0.6 KB in MindSpore 2.10, and these writes are made for each batch."""
    if parameter.has_init or (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
        return False
    array = parameter.asnumpy()
    if array.ctypes.data != parameter.data_ptr() or not array.flags.writeable or array.dtype != value.asnumpy().dtype:
        return False
    np.copyto(array, value.asnumpy())
    return True


def overwrite_changed(parameter: ms.Parameter, value: ms.Tensor) -> None:
    """Assign outside of a graph, if the value is another. The first operator that a process runs eagerly takes 20 ms,
    so a first step that has nothing to correct runs none."""
    if not np.array_equal(parameter.asnumpy(), value.asnumpy()):
        overwrite(parameter, value)


def write(parameter: ms.Parameter, value: ms.Tensor) -> ms.Tensor:
    """Assign in a graph; returns a Tensor that depends on the assignment."""
    if on_cpu() and parameter.dtype == ms.bfloat16:
        return parameter.copy_(value)  # MindSpore has no bfloat16 Assign on CPU, and no such copy on GPU
    return ops.assign(parameter, value)
