"""Clipping each unit's gradient by the norm of the unit's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.checks.arguments import check_positive_finite
from gaccum_ms.transforms.norms import clipping_factor
from gaccum_ms.transforms.transform import Transform

_NAME = "AdaptiveGradientClip"


class AdaptiveGradientClip(Transform):
    r"""
    Bound the gradient of each unit by the norm of its weights.

    This is the adaptive gradient clipping of Brock, De, Smith and Simonyan, `High-Performance Large-Scale Image
    Recognition Without Normalization <https://arxiv.org/abs/2102.06171>`_ (2021), with which networks without BatchNorm
    train with large batches. A unit is a row of a weight along axis 0: an output of `nn.Dense` , a filter of
    `nn.Conv2d` , a row of an embedding. A weight with fewer than two axes, such as a bias, is one unit. If :math:`W_i`
    are the weights of a unit and :math:`G_i` their gradient:

    .. math::
        G_i \leftarrow G_i \min\left(1, \lambda \frac{\max(\|W_i\|, \epsilon)}{\|G_i\|}\right)

    Args:
        clipping (float): :math:`\lambda` , the largest ratio of the norms. Default: ``0.01`` , the paper's value for
            large batches.
        eps (float): :math:`\epsilon` , so that weights of zero can begin to move. Default: ``1e-3`` .
        exclude (Sequence[Parameter]): Weights whose gradients are not clipped; in the paper, the last layer's.
            Default: ``()`` .

    Inputs:
        - **gradients** (tuple[Tensor]) - The finished gradients, float32.

    Outputs:
        tuple[Tensor], the gradients, clipped.

    Raises:
        TypeError: If `clipping` or `eps` is not a number, or `exclude` has something other than Parameters.
        ValueError: If `clipping` or `eps` is not positive and finite; when the step is built, if `exclude` has a
            Parameter that the optimizer lacks.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from gaccum_ms import AdaptiveGradientClip, GradAccumulationCell, TrainOneStepWithGradAccumulationCell
        >>> net = nn.Dense(3, 1, weight_init="ones", bias_init="zeros")
        >>> clip = AdaptiveGradientClip(0.1, exclude=[net.bias])
        >>> cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), 4, transforms=(clip,))
        >>> step = TrainOneStepWithGradAccumulationCell(cell, nn.SGD(net.trainable_params(), 1.0)).set_train()
        >>> loss = step(Tensor(np.ones((8, 3), np.float32)), Tensor(np.zeros((8, 1), np.float32)))
        >>> print(net.weight.asnumpy())  # each a tenth of its unit's norm nearer to zero
        [[0.9 0.9 0.9]]
    """

    def __init__(self, clipping: float = 0.01, eps: float = 1e-3, exclude: Sequence[ms.Parameter] = ()) -> None:
        super().__init__()
        check_positive_finite(_NAME, "clipping", clipping)
        check_positive_finite(_NAME, "eps", eps)
        self.clipping, self.eps = float(clipping), float(eps)
        excluded: Any = exclude
        if not isinstance(excluded, (tuple, list)) or not all(isinstance(each, ms.Parameter) for each in excluded):
            raise TypeError(
                f"For '{_NAME}', the argument 'exclude' must be a sequence of Parameters, but got {exclude!r}. Give "
                f"such as net.head.trainable_params()."
            )
        self._excluded = [(parameter,) for parameter in excluded]  # in tuples: no Parameters of this Cell

    def prepare(self, network: nn.Cell | None) -> None:
        excluded = {id(parameter): parameter.name for (parameter,) in self._excluded}
        missing = sorted(excluded[key] for key in excluded.keys() - {id(weight) for weight in self.weights})
        if missing:
            raise ValueError(
                f"For '{_NAME}', the argument 'exclude' must have weights of the optimizer, but got "
                f"{', '.join(missing)}, which it does not update. Leave them out."
            )
        self.clips = tuple(id(weight) not in excluded for weight in self.weights)

    def change(self, gradients):
        changed: tuple = ()
        for index in range(len(self.clips)):
            gradient = gradients[index]
            if self.clips[index]:
                gradient = self.clipped(gradient, self.weights[index])
            changed = (*changed, gradient)
        return changed

    def clipped(self, gradient, weight):
        largest = ops.maximum(self.norms(weight), ms.Tensor(self.eps, ms.float32)) * self.clipping
        return (self.rows(gradient) * clipping_factor(self.norms(gradient), largest)).reshape(gradient.shape)

    def norms(self, tensor):
        """The norm of each unit, shape (units, 1)."""
        rows = ops.cast(self.rows(tensor), ms.float32)
        return ops.sqrt(ops.reduce_sum(rows * rows, 1)).reshape((-1, 1))

    def rows(self, tensor):
        """A row for each unit."""
        return tensor.reshape((tensor.shape[0] if tensor.ndim > 1 else 1, -1))
