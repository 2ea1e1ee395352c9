"""The records for estimates of the gradient noise after a resume and on ranks, compared with gradients by hand. On one
process: options/test_setups.py."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import resume
from tests.support import reference
from tests.support.two_ranks import case


class Quadratic(nn.Cell):
    """Loss |w - y|^2 / 2, mean or sum over samples, weighted by a mask if there is one. A sample's gradient is w - y,
    so all values are known."""

    def __init__(self, weight, mean=True):
        super().__init__()
        self.weight = ms.Parameter(Tensor(weight, ms.float32), name="weight")
        self.mean = mean

    def construct(self, y, mask=None):
        losses = ops.square(self.weight - y).sum(axis=1) / 2
        if mask is not None:
            total = (losses * mask).sum()
            return total / mask.sum() if self.mean else total
        return losses.mean() if self.mean else losses.sum()


WEIGHT = np.array([1.0, -0.5, 2.0], np.float32)


def targets(samples, seed=0):
    return np.random.default_rng(seed).normal(size=(samples, 3)).astype(np.float32)


def gradient_of(part, mask=None):
    """The gradient summed over items, and the number of items."""
    mask = np.ones(len(part)) if mask is None else mask
    return (mask[:, None] * (WEIGHT - part)).sum(axis=0), mask.sum()


def noise_by_hand(micro_batches, window):
    """The record, from the micro-batches of all ranks and the window, given as arguments of `gradient_of` ."""
    parts = [gradient_of(*part) for part in micro_batches]
    parts = [(gradient, count) for gradient, count in parts if count]
    gradient, total = gradient_of(*window)
    squares = sum(np.square(part).sum() / count for part, count in parts)
    return np.array([squares, len(parts), total, np.square(gradient / total).sum(), total])


def cut(size, *arrays):
    """Micro-batches of `size` samples."""
    return [[array[start : start + size] for array in arrays] for start in range(0, len(arrays[0]), size)]


def noise_of(step):
    return np.array(step.window.ledger.noise.read(float(step.grad_norm.asnumpy())))


def make_step(rate=0.0, mean=True, scale_sense=None, weight=WEIGHT, **options):
    options = {"record_noise": True, "reduction": "mean" if mean else "sum", **options}
    return reference.make_step(Quadratic(weight, mean), lambda weights: nn.SGD(weights, rate), scale_sense, **options)


def test_a_window_that_is_resumed_keeps_its_records(pynative, tmp_path):
    """On the rank that saved it, and joined from two ranks with different units."""
    y = targets(20)
    paths = []
    for rank, own in enumerate((y[:8], y[8:14])):
        step = make_step(micro_size=2, accumulation_steps=2)
        step(Tensor(own))
        step.run_record.window_origin.set_data(Tensor([rank, 2], ms.int32))
        paths.append(tmp_path / f"{rank}.ckpt")
        ms.save_checkpoint(step, str(paths[-1]))
    later = make_step(micro_size=2, accumulation_steps=2)
    resume(later, paths)
    later(Tensor(y[14:]))
    np.testing.assert_allclose(noise_of(later), noise_by_hand([*cut(4, y[:8]), *cut(3, y[8:])], [y]), rtol=1e-5)


@pytest.mark.distributed
def test_records_of_two_ranks(rank_pair, tmp_path):
    ranks = rank_pair.worker("tests.ranks.single_tests_worker", tmp_path)
    results = [case(rank, "mean1") for rank in ranks]
    y, mask = targets(16), np.array([1, 0.5, 0, 0, 1, 1, 0, 2] * 2, np.float32)
    uneven = noise_by_hand([*cut(2, y[:6]), *cut(3, y[6:])], [y])
    # The mean of the two ranks' means is as noisy as a mean over 2^2 / (1 / 6 + 1 / 10) = 15 samples.
    uneven[3] = np.square((WEIGHT - y[:6]).mean(axis=0) / 2 + (WEIGHT - y[6:]).mean(axis=0) / 2).sum()
    uneven[4] = 15
    for name, expected in {
        "samples": noise_by_hand(cut(2, y), [y]),
        "uneven": uneven,
        "one each": noise_by_hand(cut(8, y), [y]),
        "spanning": noise_by_hand(cut(2, np.concatenate((y, y + 1))), [np.concatenate((y, y + 1))]),
        "counted": noise_by_hand(cut(2, y, mask), [y, mask]),
    }.items():
        for rank in results:
            np.testing.assert_allclose(rank[name], expected, rtol=1e-5, err_msg=name)
