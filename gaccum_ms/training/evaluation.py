"""What `ms.Model` evaluates and predicts with: the network and the loss inside a cell."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mindspore import nn
from mindspore.train import Loss

from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.losses import counts
from gaccum_ms.losses.batch_loss import WithBatchLossCell
from gaccum_ms.losses.stated_reduction import is_with_loss_cell
from gaccum_ms.options.options import Options


def parts_of(cell: GradAccumulationCell, loss_fn: nn.Cell | None) -> tuple[nn.Cell, nn.Cell | None]:
    """The network that predicts, and the loss of its prediction; None if the loss is not known. `loss_fn` : the loss
    that the model got beside the cell."""
    network = cell.original_network
    if loss_fn is None and isinstance(network, WithBatchLossCell):
        return network.backbone, None
    if loss_fn is None and is_with_loss_cell(network):
        network, loss_fn = network._backbone, network._loss_fn
    options = cell.options
    if loss_fn is not None and (options.aux or options.returns_ratio or options.several_losses):
        loss_fn = _LossAlone(loss_fn, options)
    return network, loss_fn


def with_its_parts(network: nn.Cell) -> nn.Cell:
    """The network, with the parts that it has now: of a `WithLossCell` , `amp_level` may replace them."""
    return nn.WithLossCell(network._backbone, network._loss_fn) if is_with_loss_cell(network) else network


def batch_evaluation(cell: GradAccumulationCell, loss_fn: nn.Cell | None, metrics: Collection[Any]) -> nn.Cell | None:
    """What evaluates a loss of the whole batch; None for other networks, of which `loss_fn` must then be known.
    `metrics` : MindSpore's objects."""
    network = cell.network
    if isinstance(network, WithBatchLossCell):
        return _BatchEvaluation(network, all(isinstance(metric, Loss) for metric in metrics))
    if loss_fn is None:
        raise ValueError(
            f"For 'GradAccumulationCell', with 'metrics' ms.Model must know the network without its loss, but got a "
            f"'{type(network).__name__}', in which the loss is not known. Give both apart: "
            f"ms.Model(GradAccumulationCell(net, ...), loss_fn, optimizer, metrics=...); or what evaluates: "
            f"eval_network=nn.WithEvalCell(net, loss_fn), eval_indexes=[0, 1, 2]."
        )
    return None


class _LossAlone(nn.Cell):
    """The one loss of a loss function that returns more, as of a batch in training."""

    def __init__(self, loss_fn: nn.Cell, options: Options) -> None:
        super().__init__(auto_prefix=False)
        self.loss_fn = loss_fn
        self.returns_ratio = options.returns_ratio
        self.min_count = options.min_count
        self.loss_weights = options.loss_weights

    def construct(self, outputs, label):
        returned, total = self.loss_fn(outputs, label), 0.0
        for index in range(len(self.loss_weights)):
            if self.returns_ratio:
                items = counts.at_least(returned[2 * index + 1], self.min_count)
                loss = counts.ratio_or_zero(returned[2 * index], items)
            else:
                loss = returned[index]
            total = total + self.loss_weights[index] * loss
        return total


class _BatchEvaluation(nn.Cell):
    """The loss of a whole batch, and two representations, the prediction and the label if metrics need them."""

    def __init__(self, network: WithBatchLossCell, only_losses: bool) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.only_losses = only_losses

    def construct(self, *inputs):
        representations = self.network.represent(*inputs)
        if not self.only_losses and len(representations) != 2:
            raise ValueError(
                "For 'WithBatchLossCell', metrics other than the loss must be of two representations, the prediction "
                "and the label, but 'backbone' returned another number. Give ms.Model an eval_network that returns "
                "the loss, the prediction and the label, and eval_indexes=[0, 1, 2]."
            )
        return self.network.loss(*representations), representations[0], representations[-1]
