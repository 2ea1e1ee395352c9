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

SMOOTHING = 0.99


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


class NoiseEstimate:
    """The noise scale, estimated from the windows so far. `smoothing` : the part of the two sums, of variances and of
    squared norms, that each window keeps. Their ratio has no bias towards the 0 with which they begin."""

    def __init__(self, smoothing: float = SMOOTHING) -> None:
        self._smoothing = smoothing
        self._variances: float | None = None
        self._square_norms = 0.0

    @property
    def noise_scale(self) -> float:
        """In items; NaN before the first estimate, infinite if the gradient cannot be distinguished from zero."""
        if self._variances is None:
            return math.nan
        return max(self._variances, 0.0) / self._square_norms if self._square_norms > 0 else math.inf

    def add(self, noise: WindowNoise) -> None:
        if noise.is_known:
            self._variances = self._smoothing * (self._variances or 0.0) + noise.variance
            self._square_norms = self._smoothing * self._square_norms + noise.true_square_norm
