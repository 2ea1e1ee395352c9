"""What the options make of the numbers of a batch's parts: the loss that training reports, without training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np

from gaccum_ms.backend.snapshot import as_numpy
from gaccum_ms.options.options import Options

Inputs = Sequence[Any]


class Numbers(NamedTuple):
    """What a part has: its losses or numerators, and the items of each, or denominators."""

    losses: np.ndarray
    items: np.ndarray


@dataclasses.dataclass
class Rule:
    """The losses of parts, by options. `call` : the network, or the function of a loop; `axes` : those of samples."""

    options: Options
    call: Callable[..., Any]
    axes: tuple[int, ...]
    is_bfloat16: bool = False  # whether the losses that were seen are

    def samples(self, part: Inputs) -> int:
        return part[0].shape[self.options.first_axis]

    def numbers(self, part: Inputs) -> Numbers:
        """Those of a part."""
        outputs, options = self.call(*part), self.options
        outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        wanted = 2 if options.returns_ratio else options.losses
        if len(outputs) < wanted or (len(outputs) > wanted and not options.aux):
            raise ValueError(f"{len(outputs)} outputs")  # training says it in its own words
        self.is_bfloat16 |= getattr(outputs[0], "dtype", None) == ms.bfloat16
        if options.returns_ratio:
            losses, items = [number(outputs[0])], [number(outputs[1])]
        else:
            items = [self.samples(part) if count is None else number(count(*part)) for count in options.counts]
            losses = [number(loss) for loss in outputs[: options.losses]]
        if not all(0 <= count < np.inf for count in items):
            raise ValueError(f"counts of {items}")  # training refuses them
        return Numbers(np.array(losses), np.array(items, float))

    def of_whole(self, whole: Numbers) -> np.ndarray:
        """The loss of a batch that is not cut."""
        if self.options.returns_ratio or self._divides_sums:
            return whole.losses / self._divisor(whole.items)
        if self.options.min_count is not None:  # of a mean
            return mean(whole.losses[None], whole.items[None], self._divisor(whole.items))
        return whole.losses

    def of_parts(self, parts: Sequence[Numbers]) -> np.ndarray:
        """The loss that the options make of its parts."""
        losses, items = (np.array(column) for column in zip(*parts, strict=True))
        if self.options.returns_ratio or self._divides_sums:
            return losses.sum(0) / self._divisor(items.sum(0))
        if not self.options.loss_is_mean:
            return losses.sum(0)
        return mean(losses, items, self._divisor(items.sum(0)))

    @property
    def _divides_sums(self) -> bool:
        return not self.options.loss_is_mean and self.options.own_count is not None

    def _divisor(self, total: np.ndarray) -> np.ndarray:
        return np.maximum(total, self.options.min_count or 1e-30)


def mean(losses: np.ndarray, items: np.ndarray, total: np.ndarray | None = None) -> np.ndarray:
    """The mean of losses by their items; a part without items is left out, as its mean is NaN."""
    weighed = np.where(items > 0, np.where(items > 0, losses, 0) * items, 0)
    return weighed.sum(0) / np.maximum(items.sum(0) if total is None else total, 1e-30)


def number(value: Any) -> float:
    if isinstance(value, ms.Tensor):
        return float(as_numpy(value).reshape(()))
    return float(value)
