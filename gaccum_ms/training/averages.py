"""Replaces the weights by the averages of a WeightAverage, temporarily."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gaccum_ms.transforms.weight_average import WeightAverage

if TYPE_CHECKING:
    from gaccum_ms.accumulation.update import Update


class Averaged:
    """Base of the step and the accumulator."""

    update: Update

    def _average(self) -> WeightAverage | None:
        return next((link for link in self.update.links if isinstance(link, WeightAverage)), None)

    @property
    def has_averages(self) -> bool:
        """Whether there is a WeightAverage."""
        return self._average() is not None

    def _refuse_to_train_averages(self) -> None:
        average = self._average()
        if average is not None and average.swapped:
            raise RuntimeError(
                f"For '{type(self).__name__}', there must be no training within 'averaged_weights()', where the "
                f"weights are their averages, but got a batch or a flush. Nothing was changed. Train after its end."
            )

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Context manager in which the weights have the values of their averages: for evaluation, export, or a
        checkpoint of the network. At its end, also after an error, the weights are restored. `Model.fit` evaluates
        within it automatically.

        Raises:
            ValueError: If `transforms` has no :class:`WeightAverage` .
            RuntimeError: If something is trained in it.
        """
        average = self._average()
        if average is None:
            raise ValueError(
                f"For '{type(self).__name__}', 'averaged_weights' needs averages, but got none among 'transforms'. "
                f"Give transforms=(..., WeightAverage(0.9999))."
            )
        with average.in_place_of_weights():
            yield
