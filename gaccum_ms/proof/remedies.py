"""Remedies for a loss that is not what the options say: each is tried on numbers that have been measured."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np

from gaccum_ms.backend.held_cells import held_values
from gaccum_ms.losses.counts import CountMask, CountSamples
from gaccum_ms.losses.counts_of_labels import CountClassWeights, CountNotIgnored
from gaccum_ms.losses.known_losses import cells_of, integer_inputs, losses_of_labels
from gaccum_ms.proof.comparison import Comparison
from gaccum_ms.proof.rule import Inputs, mean, number
from gaccum_ms.splitting.even_split import EvenSplit

RATIO = (
    'reduction="ratio", min_count=1 in place of a count, where the network returns the sum and {count}: a micro-batch '
    "that counts nothing has a loss, and belongs in"
)


class Remedy(NamedTuple):
    """`make` : the loss of all parts together, of a comparison; None if it does not fit the inputs."""

    words: str
    make: Callable[[Comparison], np.ndarray | None]

    def fits(self, comparison: Comparison) -> bool:
        value = self.make(comparison)
        return value is not None and comparison.fits(value)

    def holds(self, comparison: Comparison) -> bool:
        value = self.make(comparison)
        return value is not None and comparison.holds(value)


def remedies(comparison: Comparison) -> Iterator[Remedy]:
    """What may be wrong, the simplest first. `comparison` : shows the inputs."""
    options = comparison.rule.options
    if options.returns_ratio:
        yield Remedy("its numerator is a mean: return the sum", _divided_mean)
    elif not options.loss_is_mean:
        items = "samples" if options.own_count is None else "items"
        made = _mean_of_own if options.own_count is None else _divided_mean
        yield Remedy(f'it is a mean over {items}: reduction="mean"', made)
    elif options.losses == 1:
        yield Remedy('it is a sum: reduction="sum", or make it a mean', _sum)
        yield from _counts(comparison)
    else:
        yield from _of_several(comparison)


def _items(comparison: Comparison) -> np.ndarray:
    return np.array([numbers.items for numbers in comparison.numbers])


def _mean_of_own(comparison: Comparison) -> np.ndarray:
    return mean(comparison.losses, _items(comparison))


def _divided_mean(comparison: Comparison) -> np.ndarray:
    return _mean_of_own(comparison) / _items(comparison).sum(0)


def _sum(comparison: Comparison) -> np.ndarray:
    return comparison.losses.sum(0)


def _counts(comparison: Comparison) -> Iterator[Remedy]:
    own_count = comparison.rule.options.own_count
    known = list(known_counts(own_count, comparison.rule.call, comparison.both))
    for words, count in known:
        yield Remedy(words, functools.partial(_counted, count=count, least=0))
    for words, count in known:
        if not isinstance(count, (CountSamples, CountClassWeights)):
            what = "what 'count' counts" if count is own_count else words.removeprefix("count=")
            yield Remedy(RATIO.format(count=what), functools.partial(_counted, count=count, least=1))


def _of_several(comparison: Comparison) -> Iterator[Remedy]:
    """Other counts for those losses that differ."""
    counts = comparison.rule.options.counts
    for place in np.flatnonzero(comparison.off).tolist():
        of_place = functools.partial(_of_place, place)
        yield Remedy(f"loss {place} is a sum: make it a mean", functools.partial(of_place, _sum))
        for words, count in known_counts(counts[place], comparison.rule.call, comparison.both):
            texts = ["None" if each is None else "..." for each in counts]
            texts[place] = "None" if words == "count=None" else words.removeprefix("count=")
            make = functools.partial(_counted, count=count, least=0)
            yield Remedy(f"count=({', '.join(texts)})", functools.partial(of_place, make))


def _of_place(place: int, make: Callable[[Comparison], np.ndarray | None], comparison: Comparison) -> np.ndarray | None:
    """What is made of one loss, and what the options make of the others."""
    losses = make(comparison)
    if losses is None:
        return None
    made = comparison.made.copy()
    made[place] = losses[place]
    return made


def _counted(comparison: Comparison, count: Any, least: int) -> np.ndarray | None:
    return counted(comparison.losses, comparison.parts, count, least)


def counted(losses: np.ndarray, parts: Sequence[Inputs], count: Any, least: int) -> np.ndarray | None:
    """The losses of all parts together, weighed by a count, which is at least `least` in each part, as of a loss that
    divides so; None if it does not fit the inputs. `losses` : a row for each part."""
    try:
        items = np.array([number(count(*part)) for part in parts])
    except Exception:  # whatever a function of the user's raises
        return None
    if not (np.isfinite(items).all() and (items >= 0).all() and items.sum() > 0):
        return None
    if least:
        return (losses * np.maximum(items, least)[:, None]).sum(0) / max(items.sum(), least)
    return mean(losses, items[:, None])


def splits_on_other_axes(inputs: Inputs) -> Iterator[tuple[tuple[int, ...], EvenSplit]]:
    """Axes of samples that may be meant, such as of sequences with time in front, and the splits that name them."""
    for axes in itertools.product(*((1, 0) if getattr(value, "ndim", 0) > 1 else (0,) for value in inputs)):
        lengths = {value.shape[axis] for axis, value in zip(axes, inputs, strict=True)}
        if any(axes) and len(lengths) == 1:
            yield axes, EvenSplit(axis=1 if all(axes) else axes)


def known_counts(own_count: Any, function: Any, batch: Inputs) -> Iterator[tuple[str, Any]]:
    """Counts, each with the words that give it to the cell. `own_count` : the user's; `function` : the network, or the
    function of a loop."""
    if own_count is not None:
        yield "count=None", CountSamples()
        yield "count", own_count
    last = len(batch) - 1
    labels = [
        (index, position, shift, _words(ignore_index=(index, -100), position=(position, last), shift=(shift, 0)))
        for position, index, shift in itertools.product(reversed(integer_inputs(batch)), _ignored(function), (0, 1))
    ]
    for index, position, shift, words in labels:
        yield f"count=CountNotIgnored({words})", CountNotIgnored(index, position, shift)
    for where, weight in _class_weights(function):
        for index, position, shift, words in labels:
            more = f", {words}" if words else ""
            yield f"count=CountClassWeights({where}{more})", CountClassWeights(weight, index, position, shift)
    for position in reversed(range(len(batch))):
        if isinstance(batch[position], ms.Tensor):
            yield f"count=CountMask({_words(position=(position, last))})", CountMask(position)


def _ignored(function: Any) -> list[int]:
    """The labels that a loss may leave out: those that MindSpore's losses say, and usual ones."""
    said = [loss.ignore_index for loss in losses_of_labels(function).values()]
    own = [
        value
        for _, cell in cells_of(function)
        if not type(cell).__module__.startswith("mindspore.")
        for name, value in vars(cell).items()
        if type(value) is int and any(word in name for word in ("pad", "ignore"))
    ]
    return list(dict.fromkeys([*said, -100, *own, 0, -1]))


def _class_weights(function: Any) -> Iterator[tuple[str, ms.Tensor]]:
    """Vectors that the network holds, as losses hold the weights of classes."""
    for name, cell in cells_of(function):
        for attribute, value in held_values(cell):
            is_weight = isinstance(value, ms.Tensor) and not isinstance(value, ms.Parameter)
            if is_weight and value.ndim == 1 and value.dtype in (ms.float32, ms.float16):
                yield f"{name}.{attribute}" if name else attribute, value


def _words(**arguments: tuple[int, int]) -> str:
    """The arguments that are not as by default."""
    return ", ".join(f"{name}={value}" for name, (value, default) in arguments.items() if value != default)
