"""Another copy of a network for the same graph, which draws other random numbers.

In graph mode a random operator has the seeds that it was made with, or gets when its code is compiled. If the network
is in a graph twice, both copies of each operator would therefore draw the same numbers: the same dropout masks.
`with_other_seeds` returns a network that shares everything with the first, Parameters too, but for the cells whose
operators or code draw, and the cells around them: their operators have other seeds, and their code is compiled again.

Cells with forward hooks are copied too: if a graph calls one twice, MindSpore runs its hooks twice in each call, or
cannot compile it.
"""

from __future__ import annotations

import dis
import functools
import inspect
import random
import types
from typing import Any

from mindspore import nn, ops

from gaccum_ms.backend.held_cells import held_cells, held_values
from gaccum_ms.backend.lent import lend

_SEEDS = ("seed", "seed0", "seed1", "seed2", "Seed0", "Seed1")
_MARK = "__function_forbid_reuse__"  # of MindSpore's functions that draw: each use in a graph has seeds of its own
_LENT = object()  # the value of a mark of ours
# Their kernels on CPU have no seed: each begins with the same numbers.
_OF_CHANNELS = (ops.Dropout2D, ops.Dropout3D)


def needs_copies(network: nn.Cell) -> bool:
    """Whether the network has operators that draw random numbers, or forward hooks."""
    return any(_draws(cell) or has_forward_hooks(cell) for _, cell in held_cells(network))


def has_forward_hooks(cell: nn.Cell) -> bool:
    return bool(cell._forward_hook or cell._forward_pre_hook)


def forbid_reuse(owner: Any, network: nn.Cell) -> None:
    """While the owner lives, MindSpore compiles the functions that draw for each call of them: else all copies of a
    network would share one graph of such a function, with one set of seeds."""
    for _, cell in held_cells(network):
        kind: Any = type(cell)
        for function in _random_functions(kind):
            if not _is_marked(function):
                lend(owner, function, _MARK, _LENT)


def with_other_seeds(network: nn.Cell, copy: int) -> nn.Cell:
    """The network with other random numbers. The same `copy` gives the same numbers."""
    return _Copies(copy).of(network)


def _draws(cell: nn.Cell) -> bool:
    kind: Any = type(cell)
    return bool(_random_functions(kind)) or any(_is_random(value) for _, value in held_values(cell))


def _is_random(value: Any) -> bool:
    return isinstance(value, ops.Primitive) and (isinstance(value, _OF_CHANNELS) or bool(_seeds(value)))


def _seeds(operator: ops.Primitive) -> dict[str, int]:
    known = {**vars(operator), **operator.attrs}
    return {name: known[name] for name in _SEEDS if isinstance(known.get(name), int)}


@functools.cache
def _random_functions(kind: Any) -> list[types.FunctionType]:
    """The functions that the code of a class may call, by itself or in those that it calls, and that draw."""
    of_class = [base for base in kind.__mro__ if base is not nn.Cell]
    methods = [method for base in of_class for name, method in vars(base).items() if name != "__init__"]
    found = [each for method in methods if isinstance(method, types.FunctionType) for each in _drawing(method, set())]
    return list(dict.fromkeys(found))


def _drawing(function: Any, seen: set[Any]) -> list[types.FunctionType]:
    function = inspect.unwrap(function)
    if function in seen:
        return []
    seen.add(function)
    found = []
    for named in _named_in(function):
        if _is_marked(named):
            found.append(named)
        elif inner := _drawing(named, seen):
            found += [named, *inner]
    return found


def _is_marked(function: Any) -> bool:
    """Whether MindSpore, or the user, has marked it."""
    return getattr(function, _MARK, _LENT) is not _LENT


def _named_in(function: types.FunctionType) -> list[types.FunctionType]:
    """The functions that a function's code names, through modules too."""
    functions = []
    value: Any = None
    for step in dis.get_instructions(function):
        if step.opname == "LOAD_GLOBAL":
            value = function.__globals__.get(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(value, types.ModuleType):
            value = getattr(value, step.argval, None)
        else:
            value = None
        if isinstance(value, types.FunctionType):
            functions.append(value)
    return functions


class _Copies:
    """Copies of cells, by id; a cell that several cells hold has one copy."""

    def __init__(self, copy: int) -> None:
        self.copy = copy
        self.number = 0  # of operators
        self.made: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        """The copy of a cell, operator, method or container; the value itself, if it needs no copy."""
        if isinstance(value, nn.Cell):
            return self._of_cell(value) if needs_copies(value) else value
        if _is_random(value):
            return self._of_operator(value)
        if type(value) in (list, tuple):
            copied = type(value)(self.of(entry) for entry in value)
            return value if all(new is old for new, old in zip(copied, value, strict=True)) else copied
        if isinstance(value, dict):
            copied = type(value)((name, self.of(entry)) for name, entry in value.items())
            return value if all(copied[name] is value[name] for name in value) else copied
        if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Cell):
            return types.MethodType(value.__func__, self.of(value.__self__))
        return value

    def _of_cell(self, cell: nn.Cell) -> nn.Cell:
        if id(cell) not in self.made:
            kind: Any = type(cell)
            copied = kind.__new__(kind)
            flags, attributes = cell.__getstate__()
            copied.__setstate__((flags, {**attributes, "_compile_cache": None}))
            self.made[id(cell)] = cell, copied  # before its contents, which may hold it
            vars(copied).update({name: self.of(value) for name, value in vars(copied).items()})
        return self.made[id(cell)][1]

    def _of_operator(self, operator: ops.Primitive) -> Any:
        if id(operator) not in self.made:
            if isinstance(operator, _OF_CHANNELS):
                copied: Any = _DropChannels(operator.keep_prob, self._other(self.number))
            else:
                copied = self._seeded(operator)
            self.made[id(operator)] = operator, copied
        return self.made[id(operator)][1]

    def _seeded(self, operator: ops.Primitive) -> ops.Primitive:
        arguments = {name: value for name, value in operator.init_attrs.items() if name != "name"}
        seeds = {name: self._other(seed) for name, seed in _seeds(operator).items() if seed}  # 0: the kernel chooses
        copied = type(operator)(**{**arguments, **seeds})
        for name in operator.attrs.keys() - arguments.keys() - seeds.keys():
            copied.add_prim_attr(name, operator.attrs[name])
        return copied

    def _other(self, seed: int) -> int:
        self.number += 1
        return random.Random(f"{seed} {self.copy} {self.number}").randrange(1, 2**31)


class _DropChannels(nn.Cell):
    """What `ops.Dropout2D` and `ops.Dropout3D` compute, with a seed. Returns the result, and what was kept."""

    def __init__(self, keep_prob: float, seed: int) -> None:
        super().__init__(auto_prefix=False)
        self.dropout = ops.Dropout(keep_prob, seed, seed)

    def construct(self, x):
        factors = self.dropout(ops.ones(x.shape[:2] + (1,) * (x.ndim - 2), x.dtype))[0]
        return x * factors, ops.broadcast_to(factors > 0, x.shape)
