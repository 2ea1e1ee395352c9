"""Where a Parameter's value lies in memory, and why it must stay there once a graph has run.

MindSpore's graphs with control flow on a Tensor, a `while` or an `if` , read each Parameter for ever where it lay at
their first run. `Parameter.set_data` puts the value somewhere else: reading the Parameter shows the new one, and the
graph goes on with the old one. `load_param_into_net` , `load_checkpoint` , `init_data` and MindSpore's callbacks all
end in `set_data` , and `set_data` in the method `assign_value` . So the Parameters of a training step get an
`assign_value` of their own, which writes into the storage that they have.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import mindspore as ms
from mindspore import nn

from gaccum_ms.accumulator import overwrite


def parameters_of(cell: nn.Cell) -> Iterator[ms.Parameter]:
    """The Parameters of a Cell, and those that it holds in containers, where MindSpore lists none."""
    yield from cell.get_parameters()
    for _, part in cell.cells_and_names():
        for value in vars(part).values():
            yield from _parameters_in(value)


def _parameters_in(value: Any) -> Iterator[ms.Parameter]:
    if isinstance(value, ms.Parameter):
        yield value
    elif isinstance(value, dict):
        yield from _parameters_in(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _parameters_in(one)


def keep_in_place(parameters: Iterable[ms.Parameter], written: Callable[[], Any] | None = None) -> None:
    """Let every later write of these Parameters go into the storage that they have by then.

    Args:
        parameters (Iterable[Parameter]): Parameters of a graph.
        written (Callable, optional): A method that each write calls.
    """
    told = weakref.WeakMethod(written) if written is not None else None
    for parameter in parameters:
        if "assign_value" not in parameter.__dict__:
            parameter.assign_value = functools.partial(_assign_in_place, weakref.ref(parameter), told)


def _assign_in_place(
    held: weakref.ref[ms.Parameter], told: weakref.WeakMethod | None, value: ms.Tensor
) -> ms.Parameter:
    """`Parameter.assign_value` , without new storage where the old can hold the value."""
    written = told() if told is not None else None
    if written is not None:
        written()
    parameter: Any = held()
    if parameter.has_init or (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
        return type(parameter).assign_value(parameter, value)
    overwrite(parameter, value)
    return parameter


class Storage:
    """The places in memory where a graph reads its Parameters.

    Args:
        parameters (Iterable[Parameter]): The graph's.
    """

    def __init__(self, parameters: Iterable[ms.Parameter]) -> None:
        self.places = [(parameter, parameter.data_ptr()) for parameter in parameters]

    def moved(self) -> list[str]:
        """The names of Parameters that lie somewhere else by now."""
        return [parameter.name for parameter, place in self.places if parameter.data_ptr() != place]
