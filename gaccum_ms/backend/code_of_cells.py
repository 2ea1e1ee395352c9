"""What the code of a Cell's `construct` names, and which of the Cell's values it writes.

It is read, not run: objects that are reached in another way, such as by an alias, are not seen.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any

import mindspore as ms
from mindspore import nn

from gaccum_ms.backend.held_cells import held_values


def functions_of(cell: Any) -> Iterator[tuple[FunctionType, list[Any]]]:
    """A Cell's `construct` , or a function or method, and the user's functions and methods that it calls, each with the
    objects that it names. Code of MindSpore itself is left out."""
    if isinstance(cell, nn.Cell):
        yield from _reached(type(cell).construct, type(cell), set())
    else:
        yield from _reached(getattr(cell, "__func__", cell), type(getattr(cell, "__self__", None)), set())


def named_cells(function: Any) -> dict[str, nn.Cell]:
    """The Cells that a function or method names, by name, and as "" the Cell whose method it is. Of a Cell, itself."""
    if isinstance(function, nn.Cell):
        return {"": function}
    owner = getattr(function, "__self__", None)
    named: dict[str, Any] = {"": owner}
    for code, _ in functions_of(function):
        names = inspect.getclosurevars(code)
        held = {name: value for name, value in getattr(owner, "__dict__", {}).items() if name in code.__code__.co_names}
        named |= {**names.globals, **names.nonlocals, **held}
    return {name: value for name, value in named.items() if isinstance(value, nn.Cell)}


def _reached(function: Callable, owner: type, seen: set[int]) -> Iterator[tuple[FunctionType, list[Any]]]:
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType) or function.__module__.startswith("mindspore.") or id(function) in seen:
        return
    seen.add(id(function))
    names = inspect.getclosurevars(function)
    values = [*names.globals.values(), *names.nonlocals.values()]
    holders = [owner, *(value for value in values if isinstance(value, ModuleType))]
    values += [_attribute(holder, name) for holder in holders for name in function.__code__.co_names]
    yield function, values
    for value in values:
        if isinstance(value, FunctionType):
            yield from _reached(value, owner, seen)


def _attribute(holder: Any, name: str) -> Any:
    """The attribute as it is stored: reading it may call a module's `__getattr__` , which in NumPy's case warns."""
    value = inspect.getattr_static(holder, name, None)
    return getattr(value, "__func__", value)  # unwraps a staticmethod or classmethod


def values_of(cell: nn.Cell) -> list[Any]:
    """What a Cell holds, and what the user's code of it names."""
    values = [value for _, value in held_values(cell)]
    if not type(cell).__module__.startswith("mindspore."):
        values += [value for _, named in functions_of(cell) for value in named]
    return values


def uses(cell: nn.Cell, kinds: tuple[type, ...]) -> bool:
    """Whether one of these values is an object or a class of these classes."""
    return any(
        issubclass(value, kinds) if isinstance(value, type) else isinstance(value, kinds) for value in values_of(cell)
    )


def written_by(cell: nn.Cell, writers: tuple[Any, ...]) -> list[str]:
    """The Parameters and other Tensors that a Cell's code writes, as the code calls them. `writers` : MindSpore's
    functions and primitive classes that write their first argument."""
    written: list[str] = []
    for function, _ in functions_of(cell):
        for node in ast.walk(_tree(function)):
            if isinstance(node, ast.Call):
                written += _written_by_call(node, function, cell, writers)
            elif isinstance(node, (ast.Assign, ast.AugAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                written += [ast.unparse(target) for target in targets if _is_tensor_of(target, cell)]
    return list(dict.fromkeys(written))


def calls_of(cell: Any, functions: Sequence[Any], names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The calls of these functions in the code of a Cell or a function: each as the code names it, and the values of
    those arguments that have `names` , which follow two others. What is not known before the code runs is `Ellipsis` .
    """
    for function, _ in functions_of(cell):
        for node in ast.walk(_tree(function)):
            if isinstance(node, ast.Call) and any(_object(node.func, function, cell) is each for each in functions):
                arguments = dict(zip(names, node.args[2:], strict=False))
                arguments |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
                values = {name: _value(arguments[name], function, cell) for name in names if name in arguments}
                yield ast.unparse(node.func), values


def returned_by(cell: nn.Cell) -> list[str]:
    """What a Cell's `construct` returns, as its code says it."""
    returned = [node for node in ast.walk(_tree(inspect.unwrap(type(cell).construct))) if isinstance(node, ast.Return)]
    return [ast.unparse(node.value) for node in returned if node.value is not None]


def _value(node: ast.AST, function: FunctionType, cell: nn.Cell) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        value = _object(node, function, cell)
        return ... if value is None and not isinstance(node, ast.Attribute) else value


@functools.cache
def _tree(function: FunctionType) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # it has no source
        return ast.Module([], [])


def _written_by_call(call: ast.Call, function: FunctionType, cell: nn.Cell, writers: tuple[Any, ...]) -> list[str]:
    called = call.func
    if isinstance(called, ast.Attribute) and _writes_in_place(called.attr) and _is_tensor_of(called.value, cell):
        return [ast.unparse(called.value)]
    made = called.func if isinstance(called, ast.Call) else called  # ops.Assign()(...)
    writer = _object(made, function, cell)
    # A primitive that the Cell holds is an object of a class; a bound primitive's class writes.
    if any(writer is known or type(writer) is known for known in writers):
        if call.args and _is_missing(call.args[0], cell):  # in a branch for Cells that have it
            return []
        return [ast.unparse(call.args[0]) if call.args else ast.unparse(call)]
    return []


def _is_missing(node: ast.AST, cell: nn.Cell) -> bool:
    """Whether the code is `self.one` , and the Cell has no such attribute."""
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self" and not hasattr(cell, node.attr)


def _writes_in_place(method: str) -> bool:
    return method in ("set_data", "assign_value") or (method.endswith("_") and not method.startswith("_"))


def _is_tensor_of(node: ast.AST, cell: nn.Cell) -> bool:
    """Whether the code `self.one.other` , or `self.one.other[index]` , is a Tensor that the Cell now has."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return isinstance(node, ast.Attribute) and isinstance(_object(node, None, cell), ms.Tensor)


def _object(node: ast.AST, function: FunctionType | None, cell: nn.Cell) -> Any:
    """The object that code such as `ops.assign` or `self.center` means; None if it cannot be known."""
    if isinstance(node, ast.Attribute):
        holder = _object(node.value, function, cell)
        if isinstance(holder, nn.Cell):
            return getattr(holder, node.attr, None)  # its Parameters and Cells are found only so
        return _attribute(holder, node.attr) if isinstance(holder, (ModuleType, type)) else None
    if not isinstance(node, ast.Name):
        return None
    if node.id == "self":
        return cell
    if function is None:
        return None
    names = inspect.getclosurevars(function)
    return {**names.globals, **names.nonlocals}.get(node.id)
