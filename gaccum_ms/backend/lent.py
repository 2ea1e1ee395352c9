"""Attributes that objects of the user have only as long as an object of ours needs them.

When the last owner is gone, the attribute gets back the value that it had before, or is deleted. A value that somebody
else has set since then stays.
"""

from __future__ import annotations

import weakref
from typing import Any

_NOTHING = object()
_PARAMETERS = "_params"  # of a Cell: the dict of its Parameters, which `get_parameters` and checkpoints go through


class _Loan:
    """What an attribute was `before` , its `value` since, and the number of its owners. It is `forgotten` when the
    object goes, because another one may get its id."""

    def __init__(self, before: Any, forgotten: weakref.finalize) -> None:
        self.before, self.forgotten = before, forgotten
        self.value: Any = _NOTHING
        self.owners = 0


_loans: dict[tuple[int, str, str], _Loan] = {}


def lend(owner: Any, target: Any, name: str, value: Any, place: str = "") -> None:
    """Set an attribute while the owner lives; the value of a later owner replaces that of an earlier one. `place` : an
    attribute of the target that is a dict, in which `name` is a key."""
    key = id(target), place, name
    loan = _loans.get(key)
    if loan is None:
        loan = _loans[key] = _Loan(_read(target, name, place), _finalize(target, _loans.pop, key, None))
    _write(target, name, value, place)
    loan.value, loan.owners = value, loan.owners + 1
    _finalize(owner, _take_back, weakref.ref(target), key)


def lend_parameter(owner: Any, cell: Any, parameter: Any) -> None:
    """List a Parameter among those of a Cell while the owner lives."""
    lend(owner, cell, parameter.name, parameter, _PARAMETERS)


def is_lent_parameter(cell: Any, name: str) -> bool:
    """Whether a Cell has a Parameter of this name only by `lend_parameter` ."""
    return (id(cell), _PARAMETERS, name) in _loans


def _take_back(reference: weakref.ref, key: tuple[int, str, str]) -> None:
    target, loan = reference(), _loans.get(key)
    if target is None or loan is None:
        return
    loan.owners -= 1
    if loan.owners:
        return
    del _loans[key]
    loan.forgotten.detach()
    _, place, name = key
    value = _read(target, name, place)
    if value is loan.value or (isinstance(value, str) and value == loan.value):
        _write(target, name, loan.before, place)


def _finalize(owner: Any, *call: Any) -> weakref.finalize:
    finalize = weakref.finalize(owner, *call)
    finalize.atexit = False  # all objects go then
    return finalize


def _read(target: Any, name: str, place: str) -> Any:
    if not place and isinstance(getattr(type(target), name, None), property):
        return getattr(target, name)
    return (getattr(target, place) if place else vars(target)).get(name, _NOTHING)


def _write(target: Any, name: str, value: Any, place: str) -> None:
    if place and value is _NOTHING:
        del getattr(target, place)[name]
    elif place:
        getattr(target, place)[name] = value
    elif value is _NOTHING:
        delattr(target, name)
    else:
        setattr(target, name, value)
