"""A loss in float32 of a network in lower precision."""

from __future__ import annotations

import mindspore as ms
from mindspore import nn
from mindspore.ops.functional import mixed_precision_cast


class InFloat32(nn.Cell):
    """As MindSpore adds it to a plain network, by `amp_level` ."""

    def __init__(self, loss_fn: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.loss_fn = loss_fn

    def construct(self, outputs, label):
        return self.loss_fn(mixed_precision_cast(ms.float32, outputs), mixed_precision_cast(ms.float32, label))
