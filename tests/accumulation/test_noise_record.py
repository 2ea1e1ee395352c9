"""The records for estimates of the gradient noise, compared with gradients by hand."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import Accumulators, CountMask, GradAccumulationCell, resume
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
    return np.array(step.window.noise.read(float(step.grad_norm.asnumpy())))


def make_step(rate=0.0, mean=True, scale_sense=None, weight=WEIGHT, **options):
    options = {"record_noise": True, "reduction": "mean" if mean else "sum", **options}
    return reference.make_step(Quadratic(weight, mean), lambda weights: nn.SGD(weights, rate), scale_sense, **options)


COMPENSATED = {"accumulators": Accumulators(compensated=True), "scale_sense": Tensor([2.0**16])}
RECORDED = {
    "ragged": ({"micro_batch_size": 5}, 5),
    "whole": ({"micro_size": 1}, 12),
    "clipped": ({"micro_size": 4, "max_grad_norm": 1e-3}, 3),
    "scaled, compensated": ({"micro_batch_size": 7, **COMPENSATED}, 7),
}


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("ragged", "graph"), *((kind, "pynative") for kind in RECORDED if kind != "ragged")],
    indirect=["mode"],
)
def test_records_of_a_batch(kind, mode):
    options, size = RECORDED[kind]
    y = targets(12)
    step = make_step(**options)
    assert not hasattr(step, "window_count")  # samples are not counted at run time
    for _ in range(2):  # the second record must not include the first
        step(Tensor(y))
    np.testing.assert_allclose(noise_of(step), noise_by_hand(cut(size, y), [y]), rtol=1e-5)
    assert step.window.noise.read(1.0).is_known == (size < 12)


def test_records_with_low_precision_accumulators(pynative):
    y = targets(12)
    step = make_step(micro_size=4, accumulators=Accumulators(ms.bfloat16))
    step(Tensor(y))
    np.testing.assert_allclose(noise_of(step), noise_by_hand(cut(3, y), [y]), rtol=2e-2)


@pytest.mark.core(mode="pynative")
@pytest.mark.parametrize(
    ("size", "scale", "mode"),
    [(7, None, "pynative"), (3, Tensor([2.0**16]), "graph")],
    ids=["batches", "micro-batches, scaled"],
    indirect=["mode"],
)
def test_records_of_windows_of_several_batches(scale, size, mode):
    """The batches have unequal sizes."""
    first, second = targets(7), targets(4, 1)
    step = make_step(micro_batch_size=size, accumulation_steps=2, scale_sense=scale)
    for _ in range(2):
        step(Tensor(first))
        step(Tensor(second))
    expected = noise_by_hand([*cut(size, first), *cut(size, second)], [np.concatenate((first, second))])
    np.testing.assert_allclose(noise_of(step), expected, rtol=1e-5)


@pytest.mark.parametrize(("accumulation_steps", "mean"), [(1, True), (2, False)])
def test_records_of_counts(mean, accumulation_steps, pynative):
    """One micro-batch counts nothing, and is none."""
    y, mask = targets(8), np.array([1, 0.5, 0, 0, 1, 1, 0, 2], np.float32)
    step = make_step(mean=mean, micro_size=4, count=CountMask(), accumulation_steps=accumulation_steps)
    for _ in range(accumulation_steps):
        step(Tensor(y), Tensor(mask))
    expected = noise_by_hand(cut(2, y, mask), [y, mask]) * np.array([1, 1, 1, 1 / accumulation_steps, 1])
    expected *= accumulation_steps
    np.testing.assert_allclose(noise_of(step), expected, rtol=1e-5)
    assert step.window.noise.read(1.0).is_known


def test_a_dropped_micro_batch_is_none(pynative):
    y = targets(8)
    y[5] = np.inf
    step = make_step(micro_size=4, overflow="drop_micro_batch")
    step(Tensor(y))
    added = np.concatenate((y[:4], y[6:]))
    np.testing.assert_allclose(noise_of(step), noise_by_hand(cut(2, added), [added]), rtol=1e-5)


def test_a_flush_records_what_is_there(pynative):
    y = targets(6)
    step = make_step(micro_size=2, accumulation_steps=3)
    step(Tensor(y))
    assert step.flush()
    np.testing.assert_allclose(noise_of(step), noise_by_hand(cut(3, y), [y]), rtol=1e-5)


def test_a_window_that_failed_leaves_nothing(pynative):
    """A batch that fails half-way, in PyNative mode, drops its window and the record."""
    y = targets(8)
    step = make_step(micro_size=2, accumulation_steps=2, count=refuse_the_second_half)
    with pytest.raises(ValueError, match="refused"):
        step(Tensor(np.concatenate((y[:4], y[:4] + 100))))
    assert not step.window.noise.window_squares.asnumpy().any()


def refuse_the_second_half(y):
    if float(y.max()) > 50:
        raise ValueError("refused")
    return ms.Tensor(y.shape[0], ms.float32)


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


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("gradients_mean", [True, False], ids=["mean", "sum"])
def test_records_of_two_ranks(gradients_mean, rank_pair, tmp_path):
    """With weights by samples, two ranks that are summed give twice the mean."""
    ranks = rank_pair.worker("tests.ranks.single_tests_worker", tmp_path)
    results = [case(rank, f"mean{gradients_mean:d}") for rank in ranks]
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
        if not gradients_mean and name != "counted":
            expected = expected * [4, 1, 1, 4, 1]
        for rank in results:
            np.testing.assert_allclose(rank[name], expected, rtol=1e-5, err_msg=name)


# -- refused -----------------------------------------------------------------------------------------------------------


def test_a_record_that_is_no_bool_is_refused():
    with pytest.raises(TypeError, match="'record_noise' must be a bool, but got 1"):
        GradAccumulationCell(Quadratic(WEIGHT), 2, record_noise=1)
