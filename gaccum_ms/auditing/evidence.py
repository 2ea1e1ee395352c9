"""The measurements of an audit, and what they show."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import mindspore as ms
import numpy as np

from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.layers.batchnorm import batch_norm_names
from gaccum_ms.losses.batch_loss import WithBatchLossCell

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
    """The measurements on a cell."""

    cell: GradAccumulationCell
    weights: Sequence[ms.Parameter]
    whole: Update
    accumulated: Update
    once: np.ndarray  # losses on the batch
    again: np.ndarray  # the same, in a second call
    twice: np.ndarray  # losses on the doubled batch
    tolerance: float
    remedy: str | None = None  # what the proof of the first batch has tried, and makes the losses equal

    @property
    def of_batch(self) -> bool:
        """Whether the loss needs the whole batch."""
        return isinstance(self.cell.network, WithBatchLossCell)

    @functools.cached_property
    def batch_norm_layers(self) -> tuple[str, ...]:
        return tuple(batch_norm_names(self.cell.network))

    @functools.cached_property
    def largest(self) -> float:
        """The largest entry of all gradients."""
        return max(float(np.abs(gradient).max(initial=0)) for gradient in self.whole.gradients)

    @functools.cached_property
    def gradients(self) -> dict[str, float]:
        """The error of each gradient."""
        pairs = zip(self.accumulated.gradients, self.whole.gradients, strict=True)
        errors = (relative_error(value, whole, _SMALLEST_SCALE * self.largest) for value, whole in pairs)
        return dict(zip((weight.name for weight in self.weights), errors, strict=True))

    @functools.cached_property
    def errors(self) -> dict[str, float]:
        """The errors of the gradients and of the loss, the largest first."""
        errors = {**self.gradients, "the loss": relative_error(self.accumulated.loss, self.whole.loss)}
        return dict(sorted(errors.items(), key=lambda item: -item[1]))

    @property
    def expected(self) -> str:
        """How the loss must behave on the doubled batch, where a ratio stays the same."""
        return "mean" if self.cell.returns_ratio else self.cell.reduction

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
        known = self.of_batch or self.cell.trims or self.batch_norm_layers or self.changed_state or self.is_random
        if known or not np.isfinite(self.whole.loss) or not self.largest > 0:
            return False
        return self.behaves_as == "neither" or (self.differs and self.behaves_as == self.expected)

    @property
    def changed_state(self) -> list[str]:
        """The names of what micro-batching leaves with other values."""
        whole, accumulated = self.whole.state, self.accumulated.state
        return [name for name in whole if not self._equal(accumulated.get(name), whole[name])]

    @property
    def changed_outputs(self) -> list[int]:
        """The numbers of outputs that are not the whole batch's; those of shape () are means. Without padding they have
        other shapes."""
        if self.cell.trims:
            return []
        pairs = zip(self.accumulated.outputs, self.whole.outputs, strict=True)
        return [index for index, (value, whole) in enumerate(pairs) if whole.ndim and not self._equal(value, whole)]

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
