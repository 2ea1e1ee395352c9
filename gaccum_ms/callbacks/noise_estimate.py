r"""How noisy the gradient is.

Of a window the step records two gradients: :math:`g`, the mean over the :math:`n` items of its first micro-batch, and
:math:`\bar g`, the mean over all its :math:`N` items. With :math:`G` the true gradient and :math:`\Sigma` the
covariance of one item's,

.. math::
    \mathrm{E} |g|^2 = |G|^2 + \mathrm{tr} \Sigma / n, \quad
    \mathrm{E} |\bar g|^2 = |G|^2 + \mathrm{tr} \Sigma / N

and so, without bias, whatever the sizes,

.. math::
    \mathrm{tr} \Sigma \approx \frac{|g|^2 - |\bar g|^2}{1 / n - 1 / N}, \quad
    |G|^2 \approx \frac{N |\bar g|^2 - n |g|^2}{N - n}

the estimates of McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, arXiv:1812.06162, appendix A.1.
Over several ranks :math:`|g|^2` is the mean over the ranks' first micro-batches, weighed by their items, and :math:`n`
the mean of these. Ranks that weigh the same in the update, though their batches differ, have a mean as noisy as that
over :math:`N = R^2 / \sum_r 1 / N_r` items.

To look at all micro-batches, not at the first alone, would need fewer updates, half as many for :math:`|G|^2` , and far
fewer for a gradient of few weights and little noise; but a pass over each micro-batch's gradient.
"""

from __future__ import annotations

import math

from gaccum_ms.accumulation.noise import WindowNoise

SMOOTHING = 0.99  # how much of the old an average keeps at each update, unless the user says otherwise


class Average:
    """An exponential moving average without the bias towards its beginning at 0."""

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
    """The noise scale by the windows so far."""

    def __init__(self) -> None:
        self.variance, self.true_square_norm = Average(), Average()

    @property
    def noise_scale(self) -> float:
        """In items; NaN before anything is known, infinite where the gradient cannot be told from zero."""
        variance, square = self.variance.value, self.true_square_norm.value
        if math.isnan(variance):
            return math.nan
        return max(variance, 0.0) / square if square > 0 else math.inf

    def keep(self, noise: WindowNoise, smoothing: float) -> None:
        if noise.is_known:
            self.variance.add(noise.variance, smoothing)
            self.true_square_norm.add(noise.true_square_norm, smoothing)
