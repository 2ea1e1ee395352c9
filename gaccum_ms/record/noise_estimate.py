r"""Estimates the gradient noise.

For each window, the step records :math:`S = \sum_i n_i |g_i|^2` over its :math:`K` micro-batches, of :math:`n_i` items
and mean gradient :math:`g_i` , and the norm of :math:`\bar g` , the mean over all its :math:`N` items. If :math:`G` is
the true gradient and :math:`\Sigma` the covariance of one item's gradient,

.. math::
    \mathrm{E} S = N |G|^2 + K\, \mathrm{tr} \Sigma, \quad
    \mathrm{E} |\bar g|^2 = |G|^2 + \mathrm{tr} \Sigma / N

so that, without bias for any sizes,

.. math::
    \mathrm{tr} \Sigma \approx \frac{S - N |\bar g|^2}{K - 1}, \quad
    |G|^2 \approx |\bar g|^2 - \mathrm{tr} \Sigma / N

These generalize the estimates of McCandlish et al., "An Empirical Model of Large-Batch Training", 2018,
arXiv:1812.06162, appendix A.1, to all micro-batches of a window. Over several ranks, the sums are those of all ranks.
If ranks have equal weight but unequal batches, the mean is as noisy as one over :math:`N_e = R^2 / \sum_r 1 / N_r`
items, which then takes the place of :math:`N` in the norm's expectation, and :math:`N / N_e` that of 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

SMOOTHING = 0.99  # the default part of an average that each update keeps


class WindowNoise(NamedTuple):
    """The gradients of one window over all ranks: the sum over micro-batches of their items times the squared norm of
    their mean gradient, the number of these micro-batches and of their items; and the whole window's mean gradient,
    which is as noisy as one over `items` items."""

    squares: float
    micro_batches: float
    added_items: float
    square_norm: float
    items: float

    @property
    def is_known(self) -> bool:
        """Whether an estimate is possible: not from one micro-batch, nor if nothing was counted or one overflowed."""
        return self.items > 0 and self._degrees > 0.5 and all(map(math.isfinite, self))

    @property
    def variance(self) -> float:
        """The trace of the covariance of one item's gradient."""
        return (self.squares - self.added_items * self.square_norm) / self._degrees

    @property
    def true_square_norm(self) -> float:
        """The squared norm of the gradient without noise."""
        return self.square_norm - self.variance / self.items

    @property
    def _degrees(self) -> float:
        return self.micro_batches - self.added_items / self.items


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
