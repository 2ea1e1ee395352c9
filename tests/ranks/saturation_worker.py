"""The case of test_saturation.py on ranks (support/ranks.py): rank 1 alone overflows, on a device that saturates."""

from __future__ import annotations

from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.communication import get_rank

from gaccum_ms import GradAccumulationCell, TrainOneStepWithGradAccumulationCell
from tests.support.saturating import Saturating, batch, device_that_saturates
from tests.support.two_ranks import Results


def train(rank: int, **options) -> np.ndarray:
    """For each of three windows: whether it overflowed, and the first weight after it."""
    net = Saturating()
    cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), 4, **options)
    scale = nn.FixedLossScaleUpdateCell(2.0)
    step = TrainOneStepWithGradAccumulationCell(cell, nn.SGD(net.trainable_params(), 1e-3), scale).set_train()
    found = []
    for window in range(3):
        for _ in range(options.get("accumulation_steps", 1)):
            _, overflow, _ = step(*batch(*([5] if window == 1 and rank == 1 else [])))
        found.append([float(overflow.asnumpy()), float(net.weight.asnumpy()[0, 0])])
    return np.array(found)


def overflow(out: Path) -> Results:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    rank = get_rank()
    with device_that_saturates():
        return {"overflow/one batch": train(rank), "overflow/two batches": train(rank, accumulation_steps=2)}


CASES = {"overflow": overflow}
