r"""Estimates the gradient noise.

For each window, the step records the norms of two gradients: :math:`g`, the mean over the :math:`n` items of its first
micro-batch, and :math:`\bar g`, the mean over all its :math:`N` items. If :math:`G` is the true gradient and
:math:`\Sigma` the covariance of one item's gradient,

.. math::
    \mathrm{E} |g|^2 = |G|^2 + \mathrm{tr} \Sigma / n, \quad
    \mathrm{E} |\bar g|^2 = |G|^2 + \mathrm{tr} \Sigma / N

so that, without bias for any sizes,

.. math::
    \mathrm{tr} \Sigma \approx \frac{|g|^2 - |\bar g|^2}{1 / n - 1 / N}, \quad
    |G|^2 \approx \frac{N |\bar g|^2 - n |g|^2}{N - n}

These are the estimates of McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, arXiv:1812.06162,
appendix A.1. Over several ranks, :math:`|g|^2` is the mean over the ranks' first micro-batches, weighted by their
items, and :math:`n` is their mean number of items. If ranks have equal weight but unequal batches, the mean is as noisy
as one over :math:`N = R^2 / \sum_r 1 / N_r` items.

Using all micro-batches, and not only the first, would need fewer updates: half as many for :math:`|G|^2` , and far
fewer for a gradient of few weights and little noise. But it would cost a pass over each micro-batch's gradient.
"""

from __future__ import annotations

import math
from typing import NamedTuple

SMOOTHING = 0.99  # the default part of an average that each update keeps


class WindowNoise(NamedTuple):
    """Two gradients of one window over all ranks: the first micro-batches' mean, and the whole window's mean."""

    first_square_norm: float
    first_items: float
    square_norm: float
    items: float

    @property
    def is_known(self) -> bool:
        """Whether an estimate is possible: not if the first micro-batch was all, counted nothing, or overflowed."""
        return 0 < self.first_items < self.items * (1 - 1e-6) and all(map(math.isfinite, self))

    @property
    def variance(self) -> float:
        """The trace of the covariance of one item's gradient."""
        return (self.first_square_norm - self.square_norm) / (1 / self.first_items - 1 / self.items)

    @property
    def true_square_norm(self) -> float:
        """The squared norm of the gradient without noise."""
        return (self.items * self.square_norm - self.first_items * self.first_square_norm) / (
            self.items - self.first_items
        )


class Average:
    """An exponential moving average without bias towards its initial 0."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0

    def add(self, value: float, smoothing: float) -> None:
        self._sum = smoothing * self._sum + (1 - smoothing) * value
        self._weight = smoothing * self._weight + (1 - smoothing)

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else math.nan


class NoiseEstimate:
    """The noise scale, estimated from the windows so far."""

    def __init__(self) -> None:
        self.variance, self.true_square_norm = Average(), Average()

    @property
    def noise_scale(self) -> float:
        """In items; NaN before the first estimate, infinite if the gradient cannot be distinguished from zero."""
        variance, square = self.variance.value, self.true_square_norm.value
        if math.isnan(variance):
            return math.nan
        return max(variance, 0.0) / square if square > 0 else math.inf

    def add(self, noise: WindowNoise, smoothing: float = SMOOTHING) -> None:
        if noise.is_known:
            self.variance.add(noise.variance, smoothing)
            self.true_square_norm.add(noise.true_square_norm, smoothing)
