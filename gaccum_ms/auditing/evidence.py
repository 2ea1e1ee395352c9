"""The measurements of an audit, and what they show."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

# The relative error of a gradient that is zero except for rounding, such as a bias before a normalisation, means
# nothing. So errors are relative to at least this share of the largest entry of all gradients.
_SMALLEST_SCALE = 1e-2


@dataclass(frozen=True)
class Update:
    """The results of one update."""

    loss: float
    gradients: list[np.ndarray]
    parameters: list[np.ndarray]
    state: dict[str, np.ndarray]  # what the network writes besides weights, by name
    outputs: list[np.ndarray]  # beside the loss, with aux=True


@dataclass(frozen=True)
class Evidence:
    """The measurements, and the properties of the cell."""

    names: tuple[str, ...]  # the weights' names
    whole: Update
    accumulated: Update
    once: np.ndarray  # losses on the batch
    again: np.ndarray  # the same, in a second call
    twice: np.ndarray  # losses on the doubled batch
    tolerance: float
    reduction: str
    of_batch: bool  # whether the loss needs the whole batch
    counted: bool
    trimmed: bool  # whether padding is left out
    batch_norm_layers: tuple[str, ...]
    dropout_layers: tuple[str, ...]
    remedy: str | None = None  # what was tried and makes the updates equal
    broadcast: str | None = None  # an input that is broadcast, and the shape that it needs

    @functools.cached_property
    def largest(self) -> float:
        """The largest entry of all gradients."""
        return max(float(np.abs(gradient).max(initial=0)) for gradient in self.whole.gradients)

    @functools.cached_property
    def gradients(self) -> dict[str, float]:
        """The error of each gradient."""
        return self.errors_of(self.accumulated)

    @functools.cached_property
    def errors(self) -> dict[str, float]:
        """The errors of the gradients and of the loss, the largest first."""
        errors = {**self.gradients, "the loss": relative_error(self.accumulated.loss, self.whole.loss)}
        return dict(sorted(errors.items(), key=lambda item: -item[1]))

    @property
    def expected(self) -> str:
        """How the loss must behave on the doubled batch, where a ratio stays the same."""
        return "mean" if self.reduction == "ratio" else self.reduction

    @property
    def behaves_as(self) -> str:
        """How it behaves; as expected, if it is zero."""
        if self.of_batch:
            return "batch"
        values = {"mean": self.once, "sum": 2 * self.once}
        for kind in (self.expected, "mean", "sum"):
            if np.allclose(self.twice, values[kind], rtol=self.tolerance, atol=0):
                return kind
        return "neither"

    @property
    def differs(self) -> bool:
        """Whether micro-batching changes the result; NaN does."""
        return not all(error <= self.tolerance for error in self.errors.values())

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite([self.whole.loss, self.accumulated.loss, *self.errors.values()]).all())

    @property
    def is_random(self) -> bool:
        """Whether a second call returns another loss."""
        return not np.allclose(self.once, self.again, rtol=self.tolerance, atol=0, equal_nan=True)

    @property
    def may_have_a_remedy(self) -> bool:
        """Whether the difference comes from how micro-batches are cut and weighed, as far as is known."""
        known = self.of_batch or self.trimmed or self.batch_norm_layers or self.changed_state or self.is_random
        if known or not np.isfinite(self.whole.loss) or not self.largest > 0:
            return False
        return self.behaves_as == "neither" or (self.differs and self.behaves_as == self.expected)

    @property
    def changed_state(self) -> list[str]:
        """The names of what micro-batching leaves with other values."""
        whole, accumulated = self.whole.state, self.accumulated.state
        return [name for name in whole if not self._equal(accumulated.get(name), whole[name])]

    @property
    def lost_statistics(self) -> list[str]:
        """The names of what is not finite after micro-batches alone."""
        whole, accumulated = self.whole.state, self.accumulated.state
        return [
            name
            for name in self.changed_state
            if name in accumulated and np.isfinite(whole[name]).all() and not np.isfinite(accumulated[name]).all()
        ]

    @property
    def changed_outputs(self) -> list[int]:
        """The numbers of outputs that are not the whole batch's; those of shape () are means."""
        pairs = zip(self.accumulated.outputs, self.whole.outputs, strict=True)
        return [index for index, (value, whole) in enumerate(pairs) if whole.ndim and not self._equal(value, whole)]

    def errors_of(self, update: Update) -> dict[str, float]:
        """The error of each gradient of an update."""
        return {
            name: relative_error(value, reference, _SMALLEST_SCALE * self.largest)
            for name, value, reference in zip(self.names, update.gradients, self.whole.gradients, strict=True)
        }

    def agrees(self, update: Update) -> bool:
        """Whether an update is the whole batch's."""
        errors = [*self.errors_of(update).values(), relative_error(update.loss, self.whole.loss)]
        return all(error <= self.tolerance for error in errors)

    def agrees_on_loss(self, loss: float) -> bool:
        return relative_error(loss, self.whole.loss) <= self.tolerance

    def _equal(self, value: np.ndarray | None, whole: np.ndarray) -> bool:
        if value is None or value.shape != whole.shape:
            return False
        both_nan = (value != value) & (whole != whole)
        return relative_error(np.where(both_nan, 0, value), np.where(both_nan, 0, whole)) <= self.tolerance


def relative_error(value: np.ndarray | float, reference: np.ndarray | float, smallest_scale: float = 0.0) -> float:
    """Largest difference, relative to the largest entry of the reference."""
    value, reference = np.asarray(value, np.float64), np.asarray(reference, np.float64)
    scale = max(np.abs(reference).max(initial=0), smallest_scale, 1e-30)
    return float(np.abs(value - reference).max(initial=0) / scale)
