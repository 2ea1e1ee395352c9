"""Replaces the weights by the averages of a WeightAverage, temporarily."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from gaccum_ms.transforms.weight_average import WeightAverage

if TYPE_CHECKING:
    from gaccum_ms.accumulation.update import Update


def average_of(update: Update) -> WeightAverage | None:
    """The WeightAverage among the transforms, if there is one."""
    return next((link for link in update.links if isinstance(link, WeightAverage)), None)


def averaged_weights(update: Update) -> AbstractContextManager[None]:
    """Context manager in which the weights have the values of their averages."""
    average = average_of(update)
    if average is None:
        raise ValueError(
            f"For '{update.owner}', 'averaged_weights' needs averages, but got none among 'transforms'. Give "
            f"transforms=(..., WeightAverage(0.9999))."
        )
    return average.in_place_of_weights()
