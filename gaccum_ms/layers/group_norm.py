"""Replaces BatchNorm by GroupNorm, which normalises each sample by itself, so that accumulation is exact."""

from __future__ import annotations

import math

from mindspore import nn, ops

from gaccum_ms.checks.arguments import check_positive_int
from gaccum_ms.layers.batchnorm import batch_norms, layer_of_parameters

_NAME = "convert_batchnorm_to_groupnorm"


@ops.constexpr
def _check_shape(shape, num_groups):
    if len(shape) > 1 and math.prod(shape[1:]) == num_groups:
        raise ValueError(
            f"For '{_NAME}', a group must have more than one value of a sample, because a value normalised by itself "
            f"is 0, but got an input of shape {tuple(shape)} and {num_groups} groups. Use fewer groups."
        )


class GroupNorm(nn.GroupNorm):
    """GroupNorm for inputs with and without space, which refuses groups of one value."""

    def construct(self, x):
        _check_shape(x.shape, self.num_groups)
        return self._cal_output(x)


def convert_batchnorm_to_groupnorm(network: nn.Cell, num_groups: int) -> list[str]:
    r"""
    Replace each BatchNorm layer of a network by GroupNorm over the same channels, those of axis 1, in place.

    BatchNorm normalises by the statistics of a micro-batch, so its results depend on how the batch is split. GroupNorm
    (Wu and He, `Group Normalization <https://arxiv.org/abs/1803.08494>`_ , 2018) normalises each sample by itself, so
    an update on micro-batches equals an update on the whole batch. Layers of `nn` and `mint.nn` are replaced, for
    inputs of any number of axes, also in containers, and also if one layer is used in several places.

    The Parameters :math:`\gamma` and :math:`\beta` are kept, with their values, dtype, `requires_grad` and names: older
    checkpoints of the network still load, and an existing optimizer still trains them. The moving statistics are
    dropped: GroupNorm has none. Layers with ``use_batch_statistics=False`` are left as they are, because they normalise
    by constants.

    Note:
        The network's outputs change: a network that was trained with BatchNorm must be trained further.
        Convert it before you build the training step or `mindspore.Model` .

    Args:
        network (Cell): The network, or a cell that holds it.
        num_groups (int): The number of groups into which each layer's channels are divided. 1 normalises as LayerNorm.

    Returns:
        list[str], the names of the replaced layers, in the network's order; empty if there was none.

    Raises:
        TypeError: If `network` is not a Cell, or `num_groups` not an int.
        ValueError: If `num_groups` is less than 1 or does not divide the channels of each layer, or if `network` is
            itself a BatchNorm layer; nothing is changed then. When the network runs: if a group has only one value of a
            sample.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import nn
        >>> from gaccum_ms import convert_batchnorm_to_groupnorm
        >>> net = nn.SequentialCell(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        >>> print(convert_batchnorm_to_groupnorm(net, 4))
        ['1']
        >>> print(net[1])
        GroupNorm(num_groups=4, num_channels=8)
    """
    if not isinstance(network, nn.Cell):
        raise TypeError(f"For '{_NAME}', the argument 'network' must be a Cell, but got '{type(network).__name__}'.")
    check_positive_int(_NAME, "num_groups", num_groups)
    layers = batch_norms(network)
    _check_layers(network, layers, num_groups)
    replaced = {id(layer): _group_norm(name, layer, num_groups) for name, layer in layers.items()}
    for _, cell in list(network.cells_and_names()) if replaced else ():
        _replace_in(cell, replaced)
    return list(layers)


def _check_layers(network: nn.Cell, layers: dict[str, nn.Cell], num_groups: int) -> None:
    if any(layer is network for layer in layers.values()):
        raise ValueError(
            f"For '{_NAME}', the argument 'network' must hold the layers that are replaced, but got the layer "
            f"'{type(network).__name__}' itself. Use nn.GroupNorm in its place."
        )
    channels = {name: layer_of_parameters(layer).num_features for name, layer in layers.items()}
    misfits = [f"{name} ({number})" for name, number in channels.items() if number % num_groups]
    if misfits:
        common = math.gcd(*channels.values())
        raise ValueError(
            f"For '{_NAME}', the argument 'num_groups' must divide the channels of each layer, but got {num_groups} "
            f"and {', '.join(misfits)}. Nothing was replaced. All layers' channels are divided by {common} and its "
            f"divisors."
        )


def _group_norm(name: str, layer: nn.Cell, num_groups: int) -> nn.GroupNorm:
    with_parameters = layer_of_parameters(layer)
    group_norm = GroupNorm(num_groups, with_parameters.num_features, float(with_parameters.eps), affine=False)
    names = ("gamma", "beta") if hasattr(with_parameters, "gamma") else ("weight", "bias")  # in nn, in mint.nn
    for key, its_name in zip(("gamma", "beta"), names, strict=True):
        parameter = getattr(with_parameters, its_name)
        if parameter is None:  # mint.nn's without affine
            getattr(group_norm, key).name = f"{name}.{key}"
        else:
            group_norm.insert_param_to_cell(key, parameter)  # no new prefix for its name, unlike an assignment
    group_norm.add_flags(**layer.get_flags())  # Cell.to_float
    return group_norm.set_train(layer.training)


def _replace_in(cell: nn.Cell, replaced: dict[int, nn.GroupNorm]) -> None:
    """Replace layers among the cell's children, and in its lists: nn.SequentialCell runs a list of its children."""
    for name, child in cell._cells.items():
        cell._cells[name] = replaced.get(id(child), child)
    for name, value in vars(cell).items():
        if type(value) in (list, tuple) and any(id(entry) in replaced for entry in value):
            vars(cell)[name] = type(value)(replaced.get(id(entry), entry) for entry in value)
    cell.compile_cache.clear()  # graphs with the old layers
