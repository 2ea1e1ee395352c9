"""PerSampleLoss: a network that returns a loss for each sample, with a separate reduction, which can run later."""

from __future__ import annotations

from mindspore import nn, ops

from gaccum_ms.checks.arguments import check_one_of

_NAME = "PerSampleLoss"


class PerSampleLoss(nn.Cell):
    """
    Reduce a network's losses, one for each sample, to the scalar that :class:`GradAccumulationCell` takes.

    In semi-auto and auto parallel mode, MindSpore's compiler reduces the scalar loss of each micro-batch over devices.
    With this Cell, the losses of all micro-batches are added up first, and reduced over devices once per update. In the
    other modes it makes no difference.

    Args:
        network (Cell): The network with its loss. Its output has shape :math:`(N, ...)`, one loss for each sample or
            for each item of one: `nn.WithLossCell(net, nn.MSELoss(reduction="none"))`.
        reduction (str, optional): ``"mean"`` or ``"sum"`` over the whole output. ``"sum"`` is for a
            `GradAccumulationCell` with ``reduction="sum"`` . Default: ``"mean"`` .

    Inputs:
        - **\\*inputs** (Tensor) - The network's inputs.

    Outputs:
        Tensor of shape :math:`()`, the loss.

    Raises:
        TypeError: If `network` is not a Cell.
        ValueError: If `reduction` is not one of those above.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from gaccum_ms import GradAccumulationCell, PerSampleLoss
        >>> net = nn.Dense(3, 1, weight_init="ones", bias_init="zeros")
        >>> network = PerSampleLoss(nn.WithLossCell(net, nn.MSELoss(reduction="none")))
        >>> cell = GradAccumulationCell(network, 4)
        >>> print(cell(Tensor(np.ones((8, 3), np.float32)), Tensor(np.zeros((8, 1), np.float32))))
        9.0
    """

    def __init__(self, network: nn.Cell, reduction: str = "mean") -> None:
        super().__init__(auto_prefix=False)
        if not isinstance(network, nn.Cell):
            raise TypeError(
                f"For '{_NAME}', the argument 'network' must be a Cell, but got '{type(network).__name__}'. Wrap the "
                f"network and its loss in 'nn.WithLossCell'."
            )
        check_one_of(_NAME, "reduction", reduction, ("mean", "sum"))
        self.network = network
        self.reduction = reduction

    def construct(self, *inputs):
        return self.reduce(self.network(*inputs))

    def reduce(self, losses):
        """The mean or sum of all losses."""
        return ops.reduce_mean(losses) if self.reduction == "mean" else ops.reduce_sum(losses)
