"""The layers that drop values at random in training."""

from __future__ import annotations

from mindspore import mint, nn

from gaccum_ms.layers.dropout import dropouts


def test_layers_that_drop_are_found_and_others_not():
    drop = [nn.Dropout(p=0.5), nn.Dropout2d(0.1), mint.nn.Dropout(0.1), nn.MultiheadAttention(4, 2, dropout=0.1)]
    keep = [nn.Dropout(p=0.0), nn.Dropout1d(0.0), mint.nn.Dropout(0.0), nn.MultiheadAttention(4, 2), nn.Dense(2, 2)]
    assert list(dropouts(nn.CellList(drop + keep)).values()) == drop
