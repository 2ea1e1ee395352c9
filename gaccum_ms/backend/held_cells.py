"""The cells that a network holds, including those in tuples, lists and dicts, which `cells_and_names` leaves out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mindspore import nn


def held_cells(network: nn.Cell) -> Iterator[tuple[str, nn.Cell]]:
    """Each cell once, by name; the network itself is the first."""
    seen = {id(network)}
    todo = [("", network)]
    for prefix, cell in todo:
        yield prefix, cell
        for name, value in held_values(cell):
            if isinstance(value, nn.Cell) and id(value) not in seen:
                seen.add(id(value))
                todo.append((f"{prefix}.{name}" if prefix else name, value))


def held_values(cell: nn.Cell) -> Iterator[tuple[str, Any]]:
    """A cell's attributes, and the contents of the tuples, lists, dicts and `jit_class` objects among them, by name."""
    attributes = {name: value for name, value in vars(cell).items() if name != "_cells"}
    todo: list[tuple[str, Any]] = [*attributes.items(), *cell._cells.items()]
    seen = set()
    for name, value in todo:
        yield name, value
        if id(value) not in seen:
            seen.add(id(value))
            todo.extend((f"{name}.{key}", entry) for key, entry in _entries(value))


def _entries(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, (tuple, list)):
        return enumerate(value)
    return vars(value).items() if hasattr(type(value), "__ms_class__") and hasattr(value, "__dict__") else ()
