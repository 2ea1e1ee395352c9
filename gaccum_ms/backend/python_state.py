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
import os
import random
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import nn

from gaccum_ms.backend import no_grad
from gaccum_ms.backend.parameters import overwrite
from gaccum_ms.backend.pynative_tape import close_tape
from gaccum_ms.backend.snapshot import OF_EVERY_CELL, as_numpy, has_value

_OURS = {"mindspore", "gaccum_ms"}
_NOT_THE_USERS = {*_OURS, "numpy", *sys.stdlib_module_names} - {"__main__"}
_NOT_COMPILED = {"__init__", "__new__", "prepare", "begin_anew"}
_STORES = {"STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE", "STORE_GLOBAL"}
_STORES |= {name.replace("STORE", "DELETE") for name in _STORES}
# Names by which code changes an object without a store.
_WRITERS = {
    *(name for kind in (list, dict, set, collections.deque) for name in vars(kind) if not name.startswith("_")),
    *("setattr", "delattr", "next", "send", "fill", "put", "__setitem__", "__setattr__", "__dict__"),
} - {"copy", "count", "index", "get", "items", "keys", "values"}


class Root(NamedTuple):
    """A Cell or function. `run` calls it as a graph does, with gradients of this size."""

    name: str
    value: Any
    run: Callable[[float], Any]


class _Place(NamedTuple):
    """Where values are: `read` copies them, by key, and `write` puts them back."""

    name: Callable[[Any], str]
    read: Callable[[], dict[Any, Any]]
    write: Callable[[dict[Any, Any]], Any]
    is_lost: bool = True  # in a graph; a generator of random numbers is not, which a graph calls at each run
    is_container: bool = False  # an entry that it did not have is named by the container


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
        self._put_back = reached.keep(known)[1]

    def restore(self, generators: bool = False) -> None:
        """Put it back; `generators` : those of random numbers too."""
        self._put_back(generators)


class _Reached:
    """What a Cell or function reaches: the places of its state, the Parameters, and whether its code may write."""

    def __init__(self, root: Any, weights: Iterable[ms.Parameter]) -> None:
        self.may_write = self.takes_next = False
        self.iterators: list[str] = []
        self._places: list[_Place] = []
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
        generator = ms.get_rng_state()
        before, put_back = self.keep()
        try:
            with _eagerly(), suppress(Exception):  # what cannot run eagerly is judged by what it wrote until then
                for size in (1.0, 2.0):
                    run(size)
            changed = [
                place.name(key if key in old or not place.is_container else None)
                for place, old in before
                if place.is_lost
                for key in _differences(old, place.read())
            ]
        finally:
            close_tape()
            put_back(True)
            ms.set_rng_state(generator)
        return list(dict.fromkeys(changed))

    def keep(self, known: Container[int] = ()) -> tuple[list[tuple[_Place, dict[Any, Any]]], Callable[[bool], None]]:
        """The places with their present values, and a function that puts these back, with the generators of random
        numbers if it is asked to. `known` : the ids of Tensors that are left out."""
        before = [(place, place.read()) for place in self._places]
        tensors = [(tensor, as_numpy(tensor)) for key, tensor in self._tensors.items() if key not in known]

        def put_back(generators: bool) -> None:
            for place, old in before:
                if (place.is_lost or generators) and list(_differences(old, place.read())):
                    place.write(old)
            for tensor, value in tensors:
                if not has_value(tensor, value):
                    overwrite(tensor, ms.Tensor(value, tensor.dtype))

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
        elif not self._visit_container(name, value) and _is_the_users(type(value)):
            self._visit_object(name, value)

    def _visit_object(self, name: str, value: Any) -> None:
        attributes = getattr(value, "__dict__", {})
        slots = [slot for kind in type(value).__mro__ for slot in _slots(kind)]

        def read() -> dict[str, Any]:
            own = {key: entry for key, entry in attributes.items() if key not in OF_EVERY_CELL}
            return own | {slot: getattr(value, slot) for slot in slots if hasattr(value, slot)}

        def write(old: dict[str, Any]) -> None:
            for key in read().keys() - old.keys():
                delattr(value, key) if key in slots else attributes.pop(key)
            attributes.update((key, entry) for key, entry in old.items() if key not in slots)
            for slot in old.keys() & set(slots):
                object.__setattr__(value, slot, old[slot])

        if _is_the_users(type(value)):
            self._places.append(_Place(lambda key: f"{name}.{key}", read, write))
            self._todo.append(("", type(value)))
        self._todo += [(f"{name}.{key}", entry) for key, entry in read().items()]
        if isinstance(value, nn.Cell):
            self._todo += [(f"{name}.{key}", cell) for key, cell in value._cells.items()]

    def _visit_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if _is_the_users(base):
                entries = [(key, _function_of(entry)) for key, entry in vars(base).items() if key not in _NOT_COMPILED]
                data = [key for key, entry in entries if _is_data(entry) and not key.startswith("__")]
                self._add_names(base.__name__ + ".", vars(base), data, functools.partial(setattr, base))
                self._todo += [(f"{base.__name__}.{key}", entry) for key, entry in entries if not key.startswith("__")]
                self._todo += [(key, entry) for key, entry in entries if isinstance(entry, FunctionType)]

    def _visit_function(self, function: FunctionType) -> None:
        names = inspect.getclosurevars(function)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        cells = {name: cell for name, cell in cells.items() if name in names.nonlocals}
        for name, cell in cells.items():
            self._add(name, functools.partial(getattr, cell, "cell_contents"), functools.partial(_fill, cell))
        entries = {name: value for name, value in names.globals.items() if name != function.__name__}
        data = [name for name, value in entries.items() if _is_data(value)]
        self._add_names("", function.__globals__, data, function.__globals__.__setitem__)
        for name, module in list(entries.items()):
            if isinstance(module, ModuleType) and _is_the_users(module):
                inner = {key: vars(module)[key] for key in function.__code__.co_names if key in vars(module)}
                data = [key for key, value in inner.items() if _is_data(value)]
                self._add_names(name + ".", vars(module), data, functools.partial(setattr, module))
                entries |= {f"{name}.{key}": value for key, value in inner.items()}
        others = [value for value in (*entries.values(), *names.nonlocals.values()) if _is_of_others(value)]
        self.may_write |= bool(others) or _may_write(function.__code__)
        self.takes_next |= "next" in function.__code__.co_names
        if others:
            self._visit_generators()
        parameters = inspect.signature(function).parameters
        self._todo += [*entries.items(), *names.nonlocals.items()]
        self._todo += [(name, parameter.default) for name, parameter in parameters.items()]

    def _add_names(
        self,
        prefix: str,
        names: Mapping[str, Any],
        keys: Sequence[str],
        put: Callable[[str, Any], Any],
    ) -> None:
        """A place of some of a module's or a class's names."""
        self._places.append(
            _Place(
                lambda key: f"{prefix}{key}",
                lambda: {key: names[key] for key in keys if key in names},
                lambda old: [put(key, value) for key, value in old.items()],
            )
        )

    def _visit_generators(self) -> None:
        """The generators of random numbers that NumPy and Python share among all code."""
        self._add("numpy.random", np.random.get_state, np.random.set_state, is_lost=False)
        self._add("random", random.getstate, random.setstate, is_lost=False)

    def _add(self, name: str, get: Callable[[], Any], put: Callable[[Any], Any], is_lost: bool = True) -> None:
        self._places.append(_Place(lambda _: name, lambda: {"": get()}, lambda old: put(old[""]), is_lost))

    def _visit_container(self, name: str, value: Any) -> bool:
        if isinstance(value, (list, collections.deque)):
            self._places.append(
                _Place(
                    lambda key: name if key is None else f"{name}[{key}]",
                    lambda: dict(enumerate(value)),
                    lambda old: _refill(value, value.extend, old.values()),
                    is_container=True,
                )
            )
        elif isinstance(value, dict):
            self._places.append(
                _Place(
                    lambda key: name if key is None else f"{name}[{key!r}]",
                    lambda: dict(value),
                    lambda old: _refill(value, value.update, old),
                    is_container=True,
                )
            )
        elif isinstance(value, set):
            self._add(name, lambda: frozenset(value), lambda old: _refill(value, value.update, old))
        elif isinstance(value, np.ndarray):
            self._add(name, value.copy, lambda old: np.copyto(value, old))
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            self._add(name, lambda: bits.state, lambda old: setattr(bits, "state", old), is_lost=False)
        elif isinstance(value, np.random.RandomState):
            self._add(name, value.get_state, value.set_state, is_lost=False)
        elif isinstance(value, random.Random):
            self._add(name, value.getstate, value.setstate, is_lost=False)
        elif not isinstance(value, tuple):
            return False
        if isinstance(value, (list, tuple, collections.deque)):
            self._todo += [(f"{name}[{place}]", entry) for place, entry in enumerate(value)]
        elif isinstance(value, dict):
            self._todo += [(f"{name}[{key!r}]", entry) for key, entry in value.items()]
        return True


@contextmanager
def _eagerly() -> Iterator[None]:
    """Within it, Cells and functions with `mindspore.jit` run eagerly, in graph mode too."""
    before = os.environ.get("MS_JIT")
    os.environ["MS_JIT"] = "0"
    try:
        with no_grad():
            yield
    finally:
        if before is None:
            del os.environ["MS_JIT"]
        else:
            os.environ["MS_JIT"] = before


def _fill(cell: Any, value: Any) -> None:
    cell.cell_contents = value


def _refill(container: Any, add: Callable[[Any], Any], entries: Iterable[Any]) -> None:
    container.clear()
    add(entries)


def _differences(old: dict[Any, Any], new: dict[Any, Any]) -> Iterator[Any]:
    for key in old | new:
        if key not in old or key not in new or not _same(old[key], new[key]):
            yield key


def _same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, np.ndarray):
        return old.dtype == new.dtype and np.array_equal(old, new, equal_nan=old.dtype.kind in "fc")
    if isinstance(old, (tuple, list)):
        return len(old) == len(new) and all(map(_same, old, new))
    if isinstance(old, dict):
        return old.keys() == new.keys() and all(_same(old[key], new[key]) for key in old)
    if isinstance(old, (float, np.floating)) and old != old:
        return bool(new != new)
    return isinstance(old, (int, float, complex, str, bytes, frozenset, np.generic)) and bool(old == new)


def _root_of(value: Any) -> str:
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(module).split(".")[0]


def _is_the_users(value: Any) -> bool:
    """Whether the user or another package has written this class, function or module."""
    return _root_of(value) not in _NOT_THE_USERS


def _is_of_others(value: Any) -> bool:
    """Whether it is code of NumPy or of Python's library, of which nothing is known."""
    is_code = isinstance(value, (ModuleType, type)) or callable(value)
    return is_code and _root_of(value) in _NOT_THE_USERS - _OURS - {"builtins"} and not isinstance(value, ms.Tensor)


def _is_data(value: Any) -> bool:
    return not isinstance(value, (ModuleType, type, FunctionType, property, staticmethod, classmethod))


def _function_of(entry: Any) -> Any:
    """The function within a property or a method of a class; everything else as it is."""
    if isinstance(entry, property):
        return entry.fget
    return getattr(entry, "__func__", entry)


def _slots(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ()) if _is_the_users(kind) else ()
    return (slots,) if isinstance(slots, str) else slots


def _may_write(code: CodeType) -> bool:
    """Whether code stores anything but local variables, or calls what may."""
    if _WRITERS.intersection(code.co_names):
        return True
    for instruction in dis.get_instructions(code):
        is_outer = instruction.opname in ("STORE_DEREF", "DELETE_DEREF") and instruction.argval in code.co_freevars
        if instruction.opname in _STORES or is_outer:
            return True
    return any(_may_write(constant) for constant in code.co_consts if isinstance(constant, CodeType))
