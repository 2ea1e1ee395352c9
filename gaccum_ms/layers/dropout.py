"""Dropout: which layers draw masks in training."""

from __future__ import annotations

from mindspore import mint, nn

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, mint.nn.Dropout, mint.nn.Dropout2d)


def dropouts(network: nn.Cell) -> dict[str, nn.Cell]:
    """The layers, by name, that drop values at random in training."""
    return {name: layer for name, layer in network.cells_and_names() if _drops(layer)}


def _drops(layer: nn.Cell) -> bool:
    if isinstance(layer, nn.MultiheadAttention):
        return layer.dropout > 0
    # nn.Dropout(keep_prob=...) has no `p` ; nn.Dropout1d calls it `prob` .
    return isinstance(layer, _DROPOUTS) and 0 not in (getattr(layer, "p", None), getattr(layer, "prob", None))
