"""Finds state of Python that code writes, such as a number, or the entries of a list.

A compiled graph has such values as constants, or writes them in some branches and not in others, and says nothing.
Parameters are no such state. The code runs eagerly, and everything that it wrote is put back. Code of MindSpore alone,
and code that shows that it writes nothing, does not run.
"""

from __future__ import annotations

import collections
import dis
import functools
import inspect
import random
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import nn

from gaccum_ms.backend import no_grad
from gaccum_ms.backend.graphs import eagerly
from gaccum_ms.backend.pynative_tape import close_tape
from gaccum_ms.backend.snapshot import CONTAINERS, OF_EVERY_CELL, as_numpy, refill, restore_value

_NOT_THE_USERS = {"mindspore", "gaccum_ms", "numpy", *sys.stdlib_module_names} - {"__main__"}
_NOT_COMPILED = {"__init__", "__new__", "prepare", "begin_anew"}
_STORES = {"STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE", "STORE_GLOBAL"}
_STORES |= {name.replace("STORE", "DELETE") for name in _STORES}
# Names by which code changes an object without a store.
_WRITERS = {
    *(name for kind in (list, dict, set, collections.deque) for name in vars(kind) if not name.startswith("_")),
    *("setattr", "delattr", "next", "send", "out"),
    *("at", "copyto", "fill", "fill_diagonal", "place", "put", "put_along_axis", "putmask", "shuffle"),
    *("heapify", "heappop", "heappush", "heappushpop", "heapreplace", "insort", "insort_left", "insort_right"),
    *("__setitem__", "__setattr__", "__dict__"),
} - {"copy", "count", "index", "get", "items", "keys", "values"}


class Root(NamedTuple):
    """A Cell or function. `run` calls it as a graph does, with gradients of this size."""

    name: str
    value: Any
    run: Callable[[float], Any]


class _Place(NamedTuple):
    """Where values are: `read` copies them, by key, `write` puts them back, and `name` is what code calls that of a
    key."""

    name: Callable[[Any], str]
    read: Callable[[], dict[Any, Any]]
    write: Callable[[dict[Any, Any]], Any]


# How the state of random numbers is read, and written. It is not lost: a graph calls what draws them at each run.
_Generator = tuple[Callable[[], Any], Callable[[Any], Any]]
_SHARED_GENERATORS: list[_Generator] = [
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
    (ms.get_rng_state, ms.set_rng_state),
]


def written_state(roots: Sequence[Root], weights: Iterable[ms.Parameter]) -> list[str]:
    """The state that the roots write, as their code calls it. `weights` : what they may write besides."""
    written = []
    for root in roots:
        reached = _Reached(root.value, weights)
        if reached.may_write:
            written += [f"{name} of '{root.name}'" for name in reached.changed_by(root.run)]
    return written


class StateOutside:
    """What a Cell or function may write besides what a `Snapshot` of its Cells has; `known` : the ids of its
    Tensors."""

    def __init__(self, root: Any, known: Container[int]) -> None:
        reached = _Reached(root, ())
        self.takes_next = bool(reached.takes_next and reached.iterators)
        self.restore = reached.keep(known)[1]


class _Reached:
    """What a Cell or function reaches: the places of its state, the Parameters, and whether its code may write."""

    def __init__(self, root: Any, weights: Iterable[ms.Parameter]) -> None:
        self.may_write = self.takes_next = False
        self.iterators: list[str] = []
        self._places: list[_Place] = []
        self._generators = [*_SHARED_GENERATORS]
        self._tensors: dict[int, ms.Tensor] = {id(weight): weight for weight in weights}
        self._seen: dict[int, Any] = {}  # holds the objects, so that no other gets the id
        self._todo: list[tuple[str, Any]] = [("self", root)]
        for name, value in self._todo:
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self._visit(name, value)

    def changed_by(self, run: Callable[[float], Any]) -> list[str]:
        """The names of the values that two runs change, which are put back; of iterators, which cannot be, without a
        run."""
        if self.takes_next and self.iterators:
            return self.iterators
        before, put_back = self.keep()
        try:
            # What cannot run eagerly is judged by what it wrote until then.
            with eagerly(), no_grad(), suppress(Exception):
                for size in (1.0, 2.0):
                    run(size)
            changed = [place.name(key) for place, old in before for key in _differences(old, place.read())]
        finally:
            close_tape()
            put_back(generators=True)
        return list(dict.fromkeys(changed))

    def keep(self, known: Container[int] = ()) -> tuple[list[tuple[_Place, dict[Any, Any]]], Callable[..., None]]:
        """The places with their present values, and a function that puts these back; with `generators` , also those of
        random numbers. `known` : the ids of Tensors that are left out."""
        before = [(place, place.read()) for place in self._places]
        tensors = [(tensor, as_numpy(tensor)) for key, tensor in self._tensors.items() if key not in known]
        states = [(write, read()) for read, write in self._generators]

        def put_back(generators: bool = False) -> None:
            for place, old in before:
                if _differences(old, place.read()):
                    place.write(old)
            for tensor, value in tensors:
                restore_value(tensor, value)
            for write, state in states if generators else ():
                write(state)

        return before, put_back

    # -- what is reached -----------------------------------------------------------------------------------------------

    def _visit(self, name: str, value: Any) -> None:
        if isinstance(value, ms.Tensor):
            self._tensors[id(value)] = value
        elif isinstance(value, nn.Cell):
            self._tensors.update((id(parameter), parameter) for parameter in value.get_parameters())
            self._visit_object(name, value)
        elif isinstance(value, functools.partial):
            self._todo += [(name, part) for part in (value.func, *value.args, *value.keywords.values())]
        elif isinstance(value, MethodType):
            self._todo += [("self", value.__self__), (name, value.__func__)]
        elif isinstance(value, FunctionType) and _is_the_users(value):
            self._visit_function(inspect.unwrap(value))
        elif isinstance(value, type) and _is_the_users(value):
            self._visit_class(value)
        elif isinstance(value, Iterator):
            self.iterators.append(name)
        elif isinstance(value, (tuple, *CONTAINERS)):
            self._visit_container(name, value)
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            self._generators.append((lambda: bits.state, functools.partial(setattr, bits, "state")))
        elif isinstance(value, np.random.RandomState):
            self._generators.append((value.get_state, value.set_state))
        elif isinstance(value, random.Random):
            self._generators.append((value.getstate, value.setstate))
        elif _is_the_users(type(value)):
            self._visit_object(name, value)

    def _visit_object(self, name: str, value: Any) -> None:
        attributes = getattr(value, "__dict__", {})

        def read() -> dict[str, Any]:
            return {key: entry for key, entry in attributes.items() if key not in OF_EVERY_CELL}

        def write(old: dict[str, Any]) -> None:
            for key in read().keys() - old.keys():
                del attributes[key]
            attributes.update(old)

        if _is_the_users(type(value)):
            self._places.append(_Place(lambda key: f"{name}.{key}", read, write))
            self._todo.append(("", type(value)))
        self._todo += [(f"{name}.{key}", entry) for key, entry in read().items()]
        if isinstance(value, nn.Cell):
            self._todo += [(f"{name}.{key}", cell) for key, cell in value._cells.items()]

    def _visit_container(self, name: str, value: Any) -> None:
        if isinstance(value, (set, np.ndarray)):
            self._add(name, value.copy, functools.partial(refill, value))
            return

        def read() -> dict[Any, Any]:
            return dict(value) if isinstance(value, dict) else dict(enumerate(value))

        def write(old: dict[Any, Any]) -> None:
            refill(value, old if isinstance(value, dict) else old.values())

        self._places.append(_Place(lambda key: f"{name}[{key!r}]", read, write))
        self._todo += [(f"{name}[{key!r}]", entry) for key, entry in read().items()]

    def _visit_class(self, kind: type) -> None:
        for base in filter(_is_the_users, kind.__mro__):
            for key, entry in vars(base).items():
                if key not in _NOT_COMPILED:
                    name = f"{base.__name__}.{key}"
                    if not hasattr(entry, "__get__"):  # no function, property or method
                        self._add_attribute(name, base, key)
                    self._todo.append((name, _function_of(entry)))

    def _visit_function(self, function: FunctionType) -> None:
        names = inspect.getclosurevars(function)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._add_attribute(name, cell, "cell_contents")
        named = {name: value for name, value in names.globals.items() if name != function.__name__}
        for name in named:
            get = functools.partial(function.__globals__.get, name)
            self._add(name, get, functools.partial(function.__globals__.__setitem__, name))
        for name, module in list(named.items()):
            if isinstance(module, ModuleType) and _is_the_users(module):
                for key in vars(module).keys() & set(function.__code__.co_names):
                    self._add_attribute(f"{name}.{key}", module, key)
                    named[f"{name}.{key}"] = vars(module)[key]
        named |= names.nonlocals
        self.may_write |= _may_write(function.__code__)
        self.takes_next |= "next" in function.__code__.co_names
        self._todo += named.items()
        self._todo += [(name, parameter.default) for name, parameter in inspect.signature(function).parameters.items()]

    def _add_attribute(self, name: str, holder: Any, key: str) -> None:
        self._add(name, functools.partial(getattr, holder, key, None), functools.partial(setattr, holder, key))

    def _add(self, name: str, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        """A place of one value."""
        self._places.append(_Place(lambda _: name, lambda: {name: get()}, lambda old: put(old[name])))


def _differences(old: dict[Any, Any], new: dict[Any, Any]) -> list[Any]:
    """The keys of values that differ."""
    return [key for key in old | new if key not in old or key not in new or not _same(old[key], new[key])]


def _same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, np.ndarray):
        return old.dtype == new.dtype and np.array_equal(old, new, equal_nan=old.dtype.kind in "fc")
    if isinstance(old, (tuple, list)):
        return len(old) == len(new) and all(map(_same, old, new))
    if not isinstance(old, (int, float, complex, str, bytes, set, np.generic)):
        return False
    return bool(old == new or (old != old and new != new))


def _is_the_users(value: Any) -> bool:
    """Whether the user or another package has written this class, function or module."""
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(module).split(".")[0] not in _NOT_THE_USERS


def _function_of(entry: Any) -> Any:
    """The function within a property or a method of a class; everything else as it is."""
    if isinstance(entry, property):
        return entry.fget
    return getattr(entry, "__func__", entry)


def _may_write(code: CodeType) -> bool:
    """Whether code stores anything but local variables, or calls what may."""
    if _WRITERS.intersection(code.co_names):
        return True
    for instruction in dis.get_instructions(code):
        is_outer = instruction.opname in ("STORE_DEREF", "DELETE_DEREF") and instruction.argval in code.co_freevars
        if instruction.opname in _STORES or is_outer:
            return True
    return any(_may_write(constant) for constant in code.co_consts if isinstance(constant, CodeType))
