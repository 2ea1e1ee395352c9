"""The inputs of the gradient noise estimate: the squared gradient norms of the first micro-batch and of the window.

Gradients of two batch sizes are enough (see noise_estimate.py), so only the first micro-batch's norm is taken. The norm
of each micro-batch would cost a tenth of a small network's update. The ranks' sums are reduced together with the
window's gradients. Kernels on single numbers cost as much to start as others. So the compiled step only keeps sums;
`read` computes the rest.
"""

from __future__ import annotations

import math

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.backend.parameters import overwrite, record
from gaccum_ms.distributed.all_reduce import FusedReducer
from gaccum_ms.losses import counts
from gaccum_ms.record.noise_estimate import NoiseEstimate, WindowNoise
from gaccum_ms.transforms import norms

SUMS = 3  # squared norms times items, first micro-batches, and their items
ALL_SUMS = SUMS + 1  # and the window's items; if ranks have equal weight, the sum of one over each rank's items


class NoiseRecord(nn.Cell):
    """The sums of one window, kept until the next window ends. `grad_reducer` : reduces gradients of ranks with equal
    weight; None: ranks have weight by items. The reduced gradient is `factor` times the ranks' mean. `position` : the
    batch of a window of several; only the first is recorded."""

    def __init__(self, grad_reducer: nn.Cell | None, factor: float = 1.0, position: ms.Parameter | None = None) -> None:
        super().__init__(auto_prefix=False)
        self.ranks_weigh_the_same = grad_reducer is not None
        self.ranks, self.means = 1, False
        if isinstance(grad_reducer, FusedReducer):
            self.ranks, self.means = grad_reducer.degree, grad_reducer.mean
            factor = 1.0 if self.means else float(self.ranks)
        self.factor = factor
        self.spans_batches = position is not None
        if position is not None:
            self.window_position = position
        self.estimate = NoiseEstimate()  # of the windows that WindowRecorder has seen
        self.window_first = record("window_first", (SUMS,))  # this rank's, without loss scale
        self.noise_sums = record("noise_sums", (ALL_SUMS,))  # the last window's, of all ranks

    # -- compiled ------------------------------------------------------------------------------------------------------

    def note(self, gradients, seed_per_item, items):
        """Note the first micro-batch's norm, if the batch is its window's first. `gradients` : the gradients of its
        mean loss, times its items and `seed_per_item` ."""
        # One that counts nothing is the mean of nothing, which has no norm.
        times_items = counts.ratio_or_zero(norms.square_norm(gradients) / (seed_per_item * seed_per_item), items)
        noted = ops.stack((times_items, ops.cast(items > 0, ms.float32), items))
        if self.spans_batches:  # no branch: within a loop it would leak (see the head of step.py)
            is_first = ops.depend(self.window_position, seed_per_item) + 0 == 1
            noted = ops.select(is_first, noted, self.window_first + 0.0)
        return ops.assign(self.window_first, noted)

    def reduce(self, grad_reducer, gradients, share, after):
        """Reduce gradients over ranks with equal weight. `share` : one over this rank's items. Returns the reduced
        gradients, and a Tensor that depends on the record."""
        sums = ops.concat((ops.depend(self.window_first, after) + 0.0, share.reshape((1,))))
        reduced = grad_reducer((*gradients, sums))
        return reduced[:-1], ops.assign(self.noise_sums, reduced[-1])

    def keep(self, summed, total):
        """Record the sums of ranks with weight by items, and the total of items."""
        return ops.assign(self.noise_sums, ops.concat((summed, total.reshape((1,)))))

    def reset(self, after):
        """Reset for the next window, once `after` is computed."""
        return ops.assign(self.window_first, ops.depend(ops.zeros((SUMS,), ms.float32), after))

    # -- not compiled --------------------------------------------------------------------------------------------------

    def reset_eagerly(self) -> None:
        """Reset, outside of a graph."""
        overwrite(self.window_first, ops.zeros_like(self.window_first))

    def read(self, grad_norm: float, scale: float = 1.0) -> WindowNoise:
        """The last window's two gradients. `grad_norm` : the norm of the window's. `scale` : a factor of gradients
        that this norm lacks."""
        squares, number, first_items, items = map(float, self.noise_sums.asnumpy())
        if self.ranks_weigh_the_same:
            items = self.ranks**2 / (items * self.ranks if self.means else items)
        first = squares / first_items * (self.factor / scale) ** 2 if first_items > 0 else math.nan
        # Shares are float32; rounding gives 256 items, and not 255.99999.
        return WindowNoise(first, first_items / max(number, 1e-30), grad_norm**2, float(f"{items:.6g}"))
