"""Ready-made counts of losses over labels: of those that are not ignored, or of their classes' weights."""

from __future__ import annotations

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.checks.arguments import check_not_negative_int, described


class CountNotIgnored(nn.Cell):
    r"""
    Count for a loss that skips a label, as `nn.CrossEntropyLoss` skips `ignore_index` : the number of labels it keeps.

    The rule follows `mindspore.nn.CrossEntropyLoss <https://www.mindspore.cn/docs/en/master/api_python/nn/
    mindspore.nn.CrossEntropyLoss.html>`_: with reduction 'mean' the sum is divided by the number of labels that differ
    from `ignore_index` . With its `weight` the divisor is another: see :class:`CountClassWeights` .

    Args:
        ignore_index (int): The label that is skipped. Default: ``-100`` , as in `nn.CrossEntropyLoss` .
        position (int): Which of the network's inputs holds the labels. Default: ``-1`` , the last.
        shift (int): How many labels at the beginning of each sample the loss leaves out. A language model that
            compares ``logits[:, :-1]`` with ``labels[:, 1:]`` itself needs 1. Default: ``0`` .

    Inputs:
        - **\*inputs** (Tensor) - The network's inputs. With `shift` , the labels have shape :math:`(N, T, ...)`.

    Outputs:
        Tensor of shape :math:`()`, float32: number of labels that are not `ignore_index` .

    Raises:
        TypeError: If `shift` is not an int.
        ValueError: If `shift` is negative.
        IndexError: If there is no input number `position` .

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import Tensor
        >>> from gaccum_ms import CountNotIgnored
        >>> print(CountNotIgnored()(Tensor([[1.0], [2.0], [3.0]]), Tensor([4, -100, 7])))
        2.0
        >>> print(CountNotIgnored(shift=1)(Tensor([[4, 5, 6], [4, 5, -100]])))
        3.0
    """

    def __init__(self, ignore_index: int = -100, position: int = -1, shift: int = 0) -> None:
        super().__init__()
        check_not_negative_int("CountNotIgnored", "shift", shift)
        self.ignore_index = ignore_index
        self.position = position
        self.shift = shift

    def construct(self, *inputs):
        return ops.reduce_sum(ops.cast(self.labels(inputs) != self.ignore_index, ms.float32))

    def labels(self, inputs):
        """The labels that the loss sees."""
        labels = inputs[self.position]
        return labels[:, self.shift :] if self.shift > 0 else labels


class CountClassWeights(CountNotIgnored):
    r"""
    Count for a loss with class weights, as `nn.CrossEntropyLoss` and `nn.NLLLoss` with `weight` : the sum of the
    weights of the labels' classes, by which such a loss divides.

    The rule follows `mindspore.nn.CrossEntropyLoss <https://www.mindspore.cn/docs/en/master/api_python/nn/
    mindspore.nn.CrossEntropyLoss.html>`_ with reduction 'mean' and labels that are class indices.

    Args:
        weight (Tensor): The loss's `weight` , of shape :math:`(C,)`, one for each class.
        ignore_index (int): The label that is skipped. Default: ``-100`` , as in `nn.CrossEntropyLoss` .
        position (int): Which of the network's inputs holds the labels. Default: ``-1`` , the last.
        shift (int): As in :class:`CountNotIgnored` . Default: ``0`` .

    Inputs:
        - **\*inputs** (Tensor) - The network's inputs.

    Outputs:
        Tensor of shape :math:`()`, float32: sum of the weights of the labels that are not `ignore_index` .

    Raises:
        TypeError: If `weight` is not a Tensor, or `shift` not an int.
        ValueError: If `weight` has not one axis; if `shift` is negative.
        IndexError: If there is no input number `position` .

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import Tensor
        >>> from gaccum_ms import CountClassWeights
        >>> count = CountClassWeights(Tensor([1.0, 5.0, 20.0]))
        >>> print(count(Tensor([[1.0], [2.0], [3.0]]), Tensor([2, -100, 0])))
        21.0
    """

    def __init__(self, weight: ms.Tensor, ignore_index: int = -100, position: int = -1, shift: int = 0) -> None:
        super().__init__(ignore_index, position, shift)
        if not isinstance(weight, ms.Tensor):
            raise TypeError(
                f"For 'CountClassWeights', the argument 'weight' must be a Tensor, but got {described(weight)}. Give "
                f"the 'weight' of the loss."
            )
        if weight.ndim != 1:
            raise ValueError(
                f"For 'CountClassWeights', the argument 'weight' must have shape (C,), one weight for each class, but "
                f"got shape {weight.shape}. Give the 'weight' of the loss."
            )
        self.weight = weight

    def construct(self, *inputs):
        labels = self.labels(inputs)
        is_counted = labels != self.ignore_index
        weights = ops.gather(self.weight, ops.select(is_counted, labels, ops.zeros_like(labels)), 0)
        return ops.reduce_sum(ops.cast(weights, ms.float32) * ops.cast(is_counted, ms.float32))
