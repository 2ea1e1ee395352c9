"""Whether a network has or calls a convolution of MindSpore.

The search runs no code. It follows the network's cells, their attributes, tuples, lists and dicts, and the names in the
code of their methods and of the functions that these call.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.cpu.instructions import limit_instructions

# Conv2D, conv1d, Conv3dTranspose, conv_transpose2d, Convolution, conv_tbc; not Convert.
_CONVOLUTION = re.compile(r"conv(\d|olution|_?transpose|_?tbc)", re.IGNORECASE)


def limit_instructions_for(network: nn.Cell) -> None:
    """Limit oneDNN (see instructions.py) before the first kernel, if a network on CPU has convolutions."""
    if ms.get_context("device_target") == "CPU" and convolves(network):
        limit_instructions()


def limit_instructions_for_weights(weights: Iterable[ms.Parameter]) -> None:
    """The same if only the weights are known: weights of four axes or more are convolution kernels."""
    if ms.get_context("device_target") == "CPU" and any(weight.ndim >= 4 for weight in weights):
        limit_instructions()


def convolves(network: nn.Cell) -> bool:
    """Whether the network reaches a convolution of MindSpore."""
    seen: dict[int, Any] = {}  # the objects are kept alive, so that no id is used twice
    todo: list[Any] = [network]
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if _is_convolution(value):
            return True
        todo += _parts(value)
    return False


def _is_convolution(value: Any) -> bool:
    if isinstance(value, ops.Primitive):
        return bool(_CONVOLUTION.search(value.name))
    name = getattr(value, "__name__", "") if callable(value) else ""
    return isinstance(name, str) and bool(_CONVOLUTION.search(name)) and _is_mindspores(value)


def _is_mindspores(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] == "mindspore"


def _parts(value: Any) -> Iterator[Any]:
    """The objects that an object refers to. MindSpore's own functions are not followed: their names are enough."""
    if isinstance(value, nn.Cell):
        yield from vars(value).values()
        for kind in type(value).__mro__:
            if _is_mindspores(kind):
                yield kind
            else:
                yield from (value for name, value in vars(kind).items() if name != "__init__")
    elif isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple)):
        yield from value
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, (staticmethod, classmethod)):
        yield value.__func__
    elif isinstance(value, property):
        yield value.fget
    elif isinstance(value, FunctionType) and not _is_mindspores(value):
        yield inspect.unwrap(value)
        yield from _referred_to(value)


def _referred_to(function: FunctionType) -> Iterator[Any]:
    """The values of a function's names: its closure's, its module's, and attributes of modules among these."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not bound yet
            continue
    names = set(_names(function.__code__))
    modules: list[ModuleType] = []
    for value in (function.__globals__[name] for name in names & function.__globals__.keys()):
        yield value
        modules += [value] if isinstance(value, ModuleType) else []
    for module in modules:  # the list grows: mindspore.ops.conv2d has two dots
        for value in (vars(module)[name] for name in names & vars(module).keys()):
            yield value
            if isinstance(value, ModuleType) and value not in modules:
                modules.append(value)


def _names(code: CodeType) -> Iterator[str]:
    """The names in a function's code, and in functions inside it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
