"""GradAccumulationCell: checks and holds the options of accumulation. The arithmetic is in train_step.py."""

from __future__ import annotations

import math
from typing import Any

from mindspore import nn


def _check_positive_int(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"For 'GradAccumulationCell', the argument '{name}' must be an int, but got {value!r} of type "
            f"'{type(value).__name__}'."
        )
    if value < 1:
        raise ValueError(f"For 'GradAccumulationCell', the argument '{name}' must be at least 1, but got {value}.")


def _check_positive_finite(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"For 'GradAccumulationCell', the argument '{name}' must be a float, but got {value!r} of type "
            f"'{type(value).__name__}'."
        )
    if not (math.isfinite(value) and value > 0):
        raise ValueError(
            f"For 'GradAccumulationCell', the argument '{name}' must be positive and finite, but got {value}."
        )


class GradAccumulationCell(nn.Cell):
    r"""
    Split each batch into micro-batches and update once, as if the whole batch had gone through at once.

    The cell holds the network and the options. `mindspore.Model` and `mindspore.amp.build_train_network` build the
    training step, :class:`TrainOneStepWithGradAccumulationCell`, from it. It has the signature of
    `mindspore.nn.GradAccumulationCell <https://www.mindspore.cn/docs/en/master/api_python/nn/mindspore.nn.
    GradAccumulationCell.html>`_, and in addition works stand-alone and in data parallel mode, on CPU too, reports the
    mean loss, and accepts batches that do not divide.

    Args:
        network (Cell): The network with its loss, such as `nn.WithLossCell`. Its output is a scalar, shape
            :math:`()`: the mean over the samples of its inputs.
        micro_size (int, optional): **Number** of micro-batches per batch. Each has
            :math:`\lceil N / \text{micro_size} \rceil` samples; the last may be smaller. Default: ``None`` .

    Keyword Args:
        micro_batch_size (int, optional): Number of samples in a micro-batch, in place of `micro_size` ; the last may
            be smaller. Default: ``None`` .
        max_grad_norm (float, optional): Scale the finished, reduced gradient down to this global norm where it is
            larger, as `mindspore.ops.clip_by_global_norm` does. Default: ``None`` , no clipping.
        jit (bool, optional): In PyNative mode, compile the training step all the same. Default: ``None`` , run it
            eagerly, so that breakpoints work. Graph mode always compiles.

    Inputs:
        - **\*inputs** (Tensor) - The network's inputs, each of shape :math:`(N, ...)`.

    Outputs:
        Tensor of shape :math:`()`, the network's loss on the inputs, not split: the cell called by itself, outside
        training, is the network.

    Raises:
        TypeError: If `network` is not a Cell; if a size is not an int, `max_grad_norm` not a number, or `jit` not a
            bool.
        ValueError: If both or neither of `micro_size` and `micro_batch_size` are given; if one is less than 1; if
            `max_grad_norm` is not positive and finite.
        RuntimeError: If the cell itself is trained, by a training cell that does not know how to accumulate.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from gaccum_ms import GradAccumulationCell
        >>> net = nn.Dense(3, 1, weight_init="ones", bias_init="zeros")
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
        >>> cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), 4)
        >>> model = ms.Model(cell, optimizer=optimizer)
        >>> x, y = np.ones((8, 3), np.float32), np.zeros((8, 1), np.float32)
        >>> data_set = ms.dataset.NumpySlicesDataset((x, y), shuffle=False).batch(8)
        >>> model.train(1, data_set)
        >>> print(net.weight.asnumpy().round(4))
        [[0.4 0.4 0.4]]
    """

    def __init__(
        self,
        network: nn.Cell,
        micro_size: int | None = None,
        *,
        micro_batch_size: int | None = None,
        max_grad_norm: float | None = None,
        jit: bool | None = None,
    ) -> None:
        super().__init__(auto_prefix=False)
        if not isinstance(network, nn.Cell):
            raise TypeError(
                f"For 'GradAccumulationCell', the argument 'network' must be a Cell, but got "
                f"'{type(network).__name__}'. Wrap the network and its loss in 'nn.WithLossCell'."
            )
        if (micro_size is None) == (micro_batch_size is None):
            raise ValueError(
                f"For 'GradAccumulationCell', exactly one of 'micro_size' (number of micro-batches) and "
                f"'micro_batch_size' (samples in one) must be given, but got micro_size={micro_size} and "
                f"micro_batch_size={micro_batch_size}."
            )
        for name, value in (("micro_size", micro_size), ("micro_batch_size", micro_batch_size)):
            if value is not None:
                _check_positive_int(name, value)
        if max_grad_norm is not None:
            _check_positive_finite("max_grad_norm", max_grad_norm)
        if jit is not None and not isinstance(jit, bool):
            raise TypeError(f"For 'GradAccumulationCell', the argument 'jit' must be a bool or None, but got {jit!r}.")
        self.network = network
        self.micro_size = micro_size
        self.micro_batch_size = micro_batch_size
        self.max_grad_norm = max_grad_norm
        self.jit = jit
        self._get_attr_from_cell(network)

    @property
    def accumulates(self) -> bool:
        """Whether a batch may be split at all: with one micro-batch there is nothing to accumulate over."""
        return self.micro_size != 1

    def set_grad(self, requires_grad: bool = True) -> GradAccumulationCell:
        """Refuse to be trained as an ordinary network (`nn.TrainOneStepCell` announces that with this call)."""
        if requires_grad:
            raise RuntimeError(_TRAINED_WITHOUT_STEP)
        return super().set_grad(requires_grad)

    def construct(self, *inputs):
        if self.training:
            raise RuntimeError(_TRAINED_WITHOUT_STEP)
        return self.network(*inputs)


# The step calls the inner network, never the cell, so whoever gets here would train without accumulating, or not at
# all (`ms.Model` without an optimizer). A constant, because graph mode must be able to raise it.
_TRAINED_WITHOUT_STEP = (
    "For 'GradAccumulationCell', training must go through ms.Model(cell, optimizer=optimizer), "
    "mindspore.amp.build_train_network(cell, optimizer) or "
    "gaccum_ms.TrainOneStepWithGradAccumulationCell(cell, optimizer), with the cell outermost, an optimizer and no "
    "loss_fn, and 'gaccum_ms' imported before build_train_network is; but the cell itself is being trained. As it is "
    "used here, no gradient would be accumulated."
)
