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
    found: list[Any] = [network]
    while found:
        one = found.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if _is_convolution(one):
            return True
        found += _parts(one)
    return False


def _is_convolution(one: Any) -> bool:
    if isinstance(one, ops.Primitive):
        return bool(_CONVOLUTION.search(one.name))
    name = getattr(one, "__name__", "") if callable(one) else ""
    return isinstance(name, str) and bool(_CONVOLUTION.search(name)) and _is_mindspores(one)


def _is_mindspores(one: Any) -> bool:
    return str(getattr(one, "__module__", "")).partition(".")[0] == "mindspore"


def _parts(one: Any) -> Iterator[Any]:
    """The objects that an object refers to. MindSpore's own functions are not followed: their names are enough."""
    if isinstance(one, nn.Cell):
        yield from vars(one).values()
        for kind in type(one).__mro__:
            if _is_mindspores(kind):
                yield kind
            else:
                yield from (value for name, value in vars(kind).items() if name != "__init__")
    elif isinstance(one, Mapping):
        yield from one.values()
    elif isinstance(one, (list, tuple)):
        yield from one
    elif isinstance(one, functools.partial):
        yield from (one.func, one.args, one.keywords)
    elif isinstance(one, MethodType):
        yield from (one.__func__, one.__self__)
    elif isinstance(one, (staticmethod, classmethod)):
        yield one.__func__
    elif isinstance(one, property):
        yield one.fget
    elif isinstance(one, FunctionType) and not _is_mindspores(one):
        yield inspect.unwrap(one)
        yield from _referred_to(one)


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
