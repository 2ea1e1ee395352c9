"""Refuses layers with sparse gradients before training: they cannot be added to dense accumulators.

MindSpore represents the gradient of two primitives as (indices, values). Graph mode detects this only after our code is
compiled into the graph, and PyNative mode returns the values alone. So the network is searched before training: all
cells and primitives that it holds, and the code of its `construct` .
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from mindspore import nn, ops

from gaccum_ms.backend.held_cells import held_cells, held_values

_SPARSE = (ops.SparseGatherV2, ops.EmbeddingLookup)


def refuse_sparse_gradients(network: nn.Cell) -> None:
    """Raise for layers with sparse gradients, such as `nn.EmbeddingLookup` with ``sparse=True`` , its default.

    Raises:
        ValueError: If the network holds such a layer, in a tuple, list or dict too, or makes one in `construct` .
    """
    names = [name for name, cell in held_cells(network) if _is_sparse(cell)]
    if names:
        raise ValueError(_message(f"layers with sparse ones: {', '.join(names)}"))


def explain_sparse_gradients(error: BaseException) -> None:
    """Replace an error of MindSpore's compiler about a sparse gradient (its RowTensor) by our own."""
    if "RowTensor" in str(error):
        raise ValueError(_message("a sparse one, a RowTensor, while compiling")) from error


def _message(found: str) -> str:
    return (
        f"For 'GradAccumulationCell', gradients must be dense, but got {found}. Use nn.Embedding, or "
        f"nn.EmbeddingLookup with target='DEVICE' and sparse=False: an accumulator is as large as its table all the "
        f"same."
    )


def _is_sparse(cell: nn.Cell) -> bool:
    if isinstance(cell, nn.EmbeddingLookup):  # holds both primitives, and uses one
        return cell.sparse
    if any(isinstance(value, _SPARSE) for _, value in held_values(cell)):
        return True
    if type(cell).__module__.startswith("mindspore."):
        return False
    return any(_makes_sparse(value) for value in _named_in(type(cell).construct, type(cell), set()))


def _makes_sparse(value: Any) -> bool:
    return issubclass(value, _SPARSE) if isinstance(value, type) else isinstance(value, _SPARSE)


def _named_in(function: Callable, owner: type, seen: set[int]) -> Iterator[Any]:
    """The objects that a method's code names, and those that the user's functions and methods name that it calls."""
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType) or function.__module__.startswith("mindspore.") or id(function) in seen:
        return
    seen.add(id(function))
    names = inspect.getclosurevars(function)
    values = [*names.globals.values(), *names.nonlocals.values()]
    holders = [owner, *(value for value in values if isinstance(value, ModuleType))]
    values += [_attribute(holder, name) for holder in holders for name in function.__code__.co_names]
    for value in values:
        yield value
        if isinstance(value, FunctionType):
            yield from _named_in(value, owner, seen)


def _attribute(holder: Any, name: str) -> Any:
    """The attribute as it is stored: reading it may call a module's `__getattr__` , which in NumPy's case warns."""
    value = inspect.getattr_static(holder, name, None)
    return getattr(value, "__func__", value)  # unwraps a staticmethod or classmethod
