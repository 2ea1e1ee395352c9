"""The inputs of the gradient noise estimate: the squared norms of the gradients of all micro-batches and of the window.

The ranks' sums are reduced together with the window's gradients. Kernels on single numbers cost as much to start as
others. So the compiled step only keeps sums; `read` computes the rest.
"""

from __future__ import annotations

import math

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.backend.parameters import overwrite, state_parameter
from gaccum_ms.distributed.all_reduce import FusedReducer
from gaccum_ms.losses import counts
from gaccum_ms.record.noise_estimate import NoiseEstimate, WindowNoise
from gaccum_ms.transforms import norms

SUMS = 3  # of added micro-batches: items times squared norm; their number; their items
ALL_SUMS = SUMS + 1  # and the window's items; if ranks have equal weight, the sum of one over each rank's items


class NoiseRecord(nn.Cell):
    """The sums of one window, kept until the next window ends. `grad_reducer` : reduces gradients of ranks with equal
    weight; None: ranks have weight by items. The reduced gradient is `factor` times the ranks' mean."""

    def __init__(self, grad_reducer: nn.Cell | None, factor: float = 1.0) -> None:
        super().__init__(auto_prefix=False)
        self.ranks_weigh_the_same = grad_reducer is not None
        self.ranks = self.divided = 1
        if isinstance(grad_reducer, FusedReducer):
            self.ranks = grad_reducer.degree
            self.divided = self.ranks if grad_reducer.mean else 1  # what it divides sums by
            factor = self.ranks / self.divided
        self.factor = factor
        self.estimate = NoiseEstimate()  # of the windows that WindowRecorder has seen
        # Of this rank's open window, without loss scale.
        self.window_squares = state_parameter("window_squares", (SUMS,))
        self.noise_sums = state_parameter("noise_sums", (ALL_SUMS,))  # the last window's, of all ranks

    # -- compiled ------------------------------------------------------------------------------------------------------

    def note(self, gradients, unit, items):
        """Add a micro-batch. `gradients` : the gradients of its mean loss, times its items and `unit` ."""
        # One that counts nothing is the mean of nothing, which has no norm.
        times_items = counts.ratio_or_zero(norms.square_norm(gradients) / (unit * unit), items)
        return ops.assign_add(self.window_squares, ops.stack((times_items, ops.cast(items > 0, ms.float32), items)))

    def reduce(self, grad_reducer, gradients, share, after):
        """Reduce gradients over ranks with equal weight. `share` : one over this rank's items. Returns the reduced
        gradients, and a Tensor that depends on the record."""
        sums = ops.concat((ops.depend(self.window_squares, after) + 0.0, share.reshape((1,))))
        reduced = grad_reducer((*gradients, sums))
        return reduced[:-1], ops.assign(self.noise_sums, reduced[-1])

    def keep(self, summed, total):
        """Record the sums of ranks with weight by items, and the total of items."""
        return ops.assign(self.noise_sums, ops.concat((summed, total.reshape((1,)))))

    def reset(self, after):
        """Reset for the next window, once `after` is computed."""
        return ops.assign(self.window_squares, ops.depend(ops.zeros((SUMS,), ms.float32), after))

    # -- not compiled --------------------------------------------------------------------------------------------------

    def reset_eagerly(self) -> None:
        """Reset, outside of a graph."""
        overwrite(self.window_squares, ops.zeros_like(self.window_squares))

    def read(self, grad_norm: float, scale: float = 1.0) -> WindowNoise:
        """The last window's gradients. `grad_norm` : the norm of the window's. `scale` : a factor of gradients that
        this norm lacks."""
        squares, micro_batches, added, items = (float(value) * self.divided for value in self.noise_sums.asnumpy())
        if self.ranks_weigh_the_same:
            items = self.ranks**2 / items
        elif not math.isclose(added, items, rel_tol=1e-5):  # a part was added before noise was recorded
            squares = math.nan
        squares *= (self.factor / scale) ** 2
        # Shares are float32; rounding gives 256 items, and not 255.99999.
        return WindowNoise(squares, micro_batches, added, grad_norm**2, float(f"{items:.6g}"))
