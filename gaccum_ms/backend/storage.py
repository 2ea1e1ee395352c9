"""Keeps Parameters at their memory addresses, as long as a graph that has run lives.

MindSpore's graphs with control flow on a Tensor (a `while` or an `if` ) always read each Parameter at its address of
their first run. `Parameter.set_data` moves the value to another address: Python then reads the new value, but the graph
the old one. `load_param_into_net` , `load_checkpoint` , `init_data` and MindSpore's callbacks all call `set_data` ,
which calls the method `assign_value` . So the Parameters of a training step have their own `assign_value` , which
writes into their existing storage, until the step goes.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import mindspore as ms
from mindspore import nn

from gaccum_ms.backend.held_cells import held_cells, held_values
from gaccum_ms.backend.lent import lend
from gaccum_ms.backend.parameters import overwrite


def parameters_of(cell: nn.Cell) -> Iterator[ms.Parameter]:
    """The Parameters of a Cell, and those in its containers, which MindSpore does not list."""
    yield from cell.get_parameters()
    for _, part in held_cells(cell):
        yield from (value for _, value in held_values(part) if isinstance(value, ms.Parameter))


def keep_in_place(owner: nn.Cell, parameters: Iterable[ms.Parameter], written: Callable[[], Any] | None = None) -> None:
    """While the owner lives, every write goes into the storage that the Parameter has at that time. Each write calls
    `written` ."""
    told = weakref.WeakMethod(written) if written is not None else None
    for parameter in parameters:
        of_others = vars(parameter).get("assign_value")  # as of another step
        in_place = functools.partial(_assign_in_place, weakref.ref(parameter), told)
        lend(owner, parameter, "assign_value", of_others or in_place)


def _assign_in_place(
    reference: weakref.ref[ms.Parameter], told: weakref.WeakMethod | None, value: ms.Tensor
) -> ms.Parameter:
    """`Parameter.assign_value` , without new storage if the value fits into the old one."""
    written = told() if told is not None else None
    if written is not None:
        written()
    parameter: Any = reference()
    if parameter.has_init or (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
        return type(parameter).assign_value(parameter, value)
    overwrite(parameter, value)
    return parameter
