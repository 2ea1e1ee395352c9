"""Where a data set continues after a resume, in `ms.Model.train` and in a loop of your own.

MindSpore's `set_init_step` takes the number of batches over all epochs, and every iterator begins there until it is set
back. An iterator without `num_epochs` fails then. Here an iterator of one epoch, or of any number, begins at the
position within its epoch. The data set is as it was before, once a batch was trained on and it is asked for another
iterator, `Model.train` ends, or the step is gone.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

_ITERATORS = ("create_tuple_iterator", "create_dict_iterator")  # `for batch in data_set` calls the first
_ANY_NUMBER = -1  # epochs, MindSpore's default: no limit
_MANY = 2**31 - 1  # epochs: with a position, MindSpore needs a number


# The position that a data set had before, and the step that is resumed with it.
_before: weakref.WeakKeyDictionary[Any, tuple[int, weakref.ref]] = weakref.WeakKeyDictionary()


def begin_at(data_set: Any, position: int, step: Any) -> None:
    """Iterators begin after `position` batches, counted over all epochs, until the step has trained on a batch."""
    begin_anew(data_set)
    owner, seen = weakref.ref(step), int(step.batch_count.asnumpy())
    _before[data_set] = data_set.get_init_step(), owner
    data_set.set_init_step(position)

    def is_valid() -> bool:
        living = owner()
        return living is not None and int(living.batch_count.asnumpy()) == seen

    for name in _ITERATORS:
        setattr(data_set, name, _at_position(data_set, name, is_valid))
    weakref.finalize(step, _leave, weakref.ref(data_set), owner).atexit = False


def begin_anew(data_set: Any) -> None:
    """Iterators begin where they did before a resume."""
    if data_set not in _before:
        return
    position, _ = _before.pop(data_set)
    data_set.set_init_step(None)  # that of the data set that it reads, if there is one
    if data_set.get_init_step() != position:
        data_set.set_init_step(position)
    for name in _ITERATORS:
        vars(data_set).pop(name, None)


def _leave(reference: weakref.ref, owner: weakref.ref) -> None:
    """The step is gone. The data set may have another one since."""
    data_set = reference()
    if data_set is not None and data_set in _before and _before[data_set][1] is owner:
        begin_anew(data_set)


def _at_position(data_set: Any, name: str, is_valid: Callable[[], bool]) -> Callable:
    """The data set's method of this name, as a function: MindSpore copies a data set with its attributes, except
    functions."""
    original = getattr(type(data_set), name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def create(*arguments: Any, **named: Any) -> Any:
        if not is_valid():
            begin_anew(data_set)
            return original(data_set, *arguments, **named)
        call = signature.bind(data_set, *arguments, **named)
        call.apply_defaults()
        position, size, epochs = data_set.get_init_step(), data_set.get_dataset_size(), call.arguments["num_epochs"]
        if epochs in (1, _ANY_NUMBER):  # most loops create an iterator for each epoch
            data_set.set_init_step(position % size)
            if epochs == _ANY_NUMBER and position % size:
                call.arguments["num_epochs"] = _MANY
        elif isinstance(epochs, int) and position >= epochs * size:
            raise ValueError(
                f"For 'resume', the argument 'num_epochs' of '{name}' must be the number of all epochs, those that are "
                f"finished among them, as in Model.train, but got {epochs} where {position // size} are finished. Give "
                f"the number that the training ends with, or make an iterator for each epoch."
            )
        try:
            return original(*call.args, **call.kwargs)
        finally:
            data_set.set_init_step(position)

    return create
