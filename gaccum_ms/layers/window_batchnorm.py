r"""BatchNorm whose moving statistics are the window's: pooled over its micro-batches and all ranks, moved once.

A micro-batch with :math:`n` values of a channel has the mean :math:`m` and the variance :math:`v` . By the law of total
variance, mean and variance of all :math:`N` values are

.. math::
    M = c + \frac 1 N \sum n (m - c), \quad V = \frac 1 N \sum n \left(v + (m - c)^2\right) - (M - c)^2

for any :math:`c` . Here :math:`c` is the moving mean: it is close to :math:`m` , which keeps rounding errors small.
Each layer adds up its sums in a Parameter, and the window's end reduces the sums of all layers together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from gaccum_ms.backend.parameters import of_this_rank, overwrite
from gaccum_ms.checks.arguments import check_positive_int

_NAME = "WindowBatchNorm"


class WindowBatchNorm(nn.Cell):
    r"""
    BatchNorm that moves its moving statistics once per update, by the whole window's mean and variance.

    It replaces `nn.BatchNorm1d <https://www.mindspore.cn/docs/en/master/api_python/nn/mindspore.nn.BatchNorm1d.html>`_
    , `2d` and `3d` , with Parameters of the same names, in a network that a :class:`GradAccumulationCell` trains. In
    training, a micro-batch is normalised by its own mean and variance, as in those layers: one micro-batch at a time,
    there is no other way. But the moving mean and variance, which normalise in evaluation, move once per update,
    towards the mean and the unbiased variance of all values of the window, over all micro-batches, batches and ranks.
    If the layer's inputs do not depend on other layers' statistics, these are the whole batch's. A window without
    update moves nothing, and a micro-batch whose values are not finite is left out. Only the training step of a
    :class:`GradAccumulationCell` moves them, and not in semi-auto or auto parallel mode.

    Args:
        num_features (int): Channels, the length of axis 1 of the input.
        eps (float): Added to the variance. Default: ``1e-5`` .
        momentum (float): The part of the moving statistics that an update keeps, between 0 and 1, as in MindSpore's
            layers. Default: ``0.9`` .
        affine (bool): Whether scale and shift are trained. Default: ``True`` .

    Inputs:
        - **x** (Tensor) - Of shape :math:`(N, C, *)` , float32 or float16.

    Outputs:
        Tensor, of the shape and dtype of `x` .

    Raises:
        TypeError: If `num_features` is not an int.
        ValueError: If `num_features` is less than 1, or `momentum` is not between 0 and 1.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from gaccum_ms import GradAccumulationCell, TrainOneStepWithGradAccumulationCell, WindowBatchNorm
        >>> net = nn.SequentialCell(WindowBatchNorm(2, momentum=0.5), nn.Dense(2, 1))
        >>> cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), 2)
        >>> step = TrainOneStepWithGradAccumulationCell(cell, nn.SGD(net.trainable_params(), 0.1)).set_train()
        >>> x = Tensor(np.array([[0, 0], [2, 0], [4, 2], [6, 2]], np.float32))
        >>> loss = step(x, Tensor(np.zeros((4, 1), np.float32)))
        >>> print(net[0].moving_mean.asnumpy())  # of means 3 and 1
        [1.5 0.5]
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.9, affine: bool = True) -> None:
        super().__init__()
        check_positive_int(_NAME, "num_features", num_features)
        if not 0 <= momentum <= 1:
            raise ValueError(f"For '{_NAME}', the argument 'momentum' must be between 0 and 1, but got {momentum}.")
        self.num_features = num_features
        self.eps = eps
        self.momentum = momentum
        zeros, ones = (ms.Tensor(value(num_features, np.float32)) for value in (np.zeros, np.ones))
        self.gamma = ms.Parameter(ones.copy(), name="gamma", requires_grad=affine)
        self.beta = ms.Parameter(zeros.copy(), name="beta", requires_grad=affine)
        self.moving_mean = ms.Parameter(zeros.copy(), name="moving_mean", requires_grad=False)
        self.moving_variance = ms.Parameter(ones.copy(), name="moving_variance", requires_grad=False)
        # The number of values per channel; then, for each channel, the two sums of the module docstring.
        sums = ms.Tensor(np.zeros(1 + 2 * num_features, np.float32))
        self.window_statistics = of_this_rank("window_statistics", sums)

    # -- compiled ------------------------------------------------------------------------------------------------------

    def construct(self, x):
        values = ops.cast(x, ms.float32)
        axes = (0, *range(2, x.ndim))
        shape = (1, self.num_features) + (1,) * (x.ndim - 2)
        if self.training:
            mean = ops.reduce_mean(values, axes)
            variance = ops.reduce_mean(ops.square(values - mean.reshape(shape)), axes)
            mean = ops.depend(mean, self._add(x, ops.stop_gradient(mean), ops.stop_gradient(variance)))
        else:
            mean, variance = self.moving_mean + 0.0, self.moving_variance + 0.0
        factor = ops.rsqrt(variance + self.eps) * self.gamma
        result = (values - mean.reshape(shape)) * factor.reshape(shape) + self.beta.reshape(shape)
        return ops.cast(result, x.dtype)

    def _add(self, x, mean, variance):
        count = x.size // self.num_features
        off = mean - self.moving_mean
        sums = ops.concat((ms.Tensor([count], ms.float32), count * off, count * (variance + off * off)))
        sums = ops.select(ops.isfinite(sums).all(), sums, ops.zeros_like(sums))
        return ops.assign_add(self.window_statistics, sums)

    def move(self, sums):
        """Move the moving statistics, by a window's sums over all ranks."""
        count = sums[0]
        values = ops.maximum(count, ms.Tensor(1.0, ms.float32))
        off = sums[1 : 1 + self.num_features] / values
        variance = sums[1 + self.num_features :] / values - off * off
        variance = variance * (values / ops.maximum(values - 1, ms.Tensor(1.0, ms.float32)))  # MindSpore's is unbiased
        moved = ops.select(count > 0, ops.full_like(count, 1 - self.momentum), ops.zeros_like(count))
        old_variance = self.moving_variance + 0.0
        done = ops.assign_add(self.moving_mean, moved * off)
        return ops.depend(done, ops.assign(self.moving_variance, old_variance + moved * (variance - old_variance)))


class WindowStatistics(nn.Cell):
    """The statistics of all layers, at a window's end."""

    def __init__(self, layers: Sequence[WindowBatchNorm]) -> None:
        super().__init__(auto_prefix=False)
        self.layers = nn.CellList(layers, auto_prefix=False)
        self.sizes = tuple(layer.window_statistics.size for layer in layers)
        self.reduces = ms.get_auto_parallel_context("parallel_mode") == ms.ParallelMode.DATA_PARALLEL
        self.over_ranks: Any = ops.AllReduce() if self.reduces else None

    def move(self, after):
        """Move them, once `after` is computed, with one collective for all layers."""
        sums = ops.concat([ops.depend(layer.window_statistics, after) + 0.0 for layer in self.layers])
        if self.reduces:
            sums = self.over_ranks(sums)
        start = 0
        for index, layer in enumerate(self.layers):
            after = ops.depend(after, layer.move(sums[start : start + self.sizes[index]]))
            start = start + self.sizes[index]
        return after

    def reset(self, after):
        """Zero the window's sums, once `after` is computed."""
        for layer in self.layers:
            zeros = ops.depend(ops.zeros_like(layer.window_statistics), after)
            after = ops.depend(after, ops.assign(layer.window_statistics, zeros))
        return after

    # -- not compiled --------------------------------------------------------------------------------------------------

    def reset_eagerly(self) -> None:
        """Zero the window's sums."""
        for layer in self.layers:
            overwrite(layer.window_statistics, ops.zeros_like(layer.window_statistics))


def window_statistics(network: nn.Cell) -> Any:
    """The WindowStatistics of a network; None if it has no such layers."""
    layers = [cell for _, cell in network.cells_and_names() if isinstance(cell, WindowBatchNorm)]
    return WindowStatistics(layers) if layers else None
