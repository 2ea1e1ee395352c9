"""Cases that one test each needs on ranks (support/ranks.py): WindowBatchNorm (test_window_batchnorm.py), the record of
the noise (test_noise_record.py), and an overflow on a device that saturates (test_saturation.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import get_rank

from gaccum_ms import CountMask, WindowBatchNorm
from tests.accumulation import test_noise_record as noise
from tests.layers import test_window_batchnorm as batchnorm
from tests.ranks.cases import named, set_up
from tests.support.reference import make_step
from tests.support.saturating import Saturating, batch, device_that_saturates
from tests.support.two_ranks import Results


def pooled(out: Path) -> Results:
    """The moving statistics after each rank has trained on its half of each batch."""
    set_up()
    rank = get_rank()
    own = [(x[rank::2], y[rank::2]) for x, y in batchnorm.data(12)]
    step = batchnorm.step_of(WindowBatchNorm(2), micro_size=2)
    spanning = batchnorm.step_of(WindowBatchNorm(2), micro_size=2, accumulation_steps=2)
    parts = [part for x, y in own for part in ((x[:3], y[:3]), (x[3:], y[3:]))]
    return {"pooled/single": batchnorm.run(step, own), "pooled/spanning": batchnorm.run(spanning, parts)}


def noise_records(out: Path) -> Results:
    set_up()
    rank = get_rank()
    y, mask = noise.targets(16), np.array([1, 0.5, 0, 0, 1, 1, 0, 2] * 2, np.float32)
    half, part = np.split(y, 2)[rank], slice(0, 6) if rank == 0 else slice(6, 16)
    results = {}
    for name, options, batches in (
        ("samples", {"micro_size": 4}, [(half,)]),
        ("uneven", {"micro_batch_size": 2 + rank}, [(y[part],)]),
        ("one each", {"micro_size": 1}, [(half,)]),
        ("spanning", {"micro_size": 4, "accumulation_steps": 2}, [(half,), (half + 1,)]),
        ("counted", {"micro_batch_size": 2, "count": CountMask()}, [(y[part], mask[part])]),
    ):
        step = noise.make_step(**options)
        for one_batch in batches:
            step(*map(Tensor, one_batch))
        results[name] = noise.noise_of(step)
    return named("mean1", results)


def saturated(rank: int, **options) -> np.ndarray:
    """For each of three windows: whether it overflowed, and the first weight after it. Rank 1 alone overflows."""
    net = Saturating()
    loss, scale = nn.WithLossCell(net, nn.MSELoss()), nn.FixedLossScaleUpdateCell(2.0)
    step = make_step(loss, lambda weights: nn.SGD(weights, 1e-3), scale, micro_size=4, **options)
    rows = []
    for window in range(3):
        for _ in range(options.get("accumulation_steps", 1)):
            _, overflow, _ = step(*batch(*([5] if window == 1 and rank == 1 else [])))
        rows.append([float(overflow.asnumpy()), float(net.weight.asnumpy()[0, 0])])
    return np.array(rows)


def overflow(out: Path) -> Results:
    set_up()
    rank = get_rank()
    with device_that_saturates():
        return {"overflow/one batch": saturated(rank), "overflow/two batches": saturated(rank, accumulation_steps=2)}


CASES = {"pooled": pooled, "overflow": overflow, "mean1": noise_records}
