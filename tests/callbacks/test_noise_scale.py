"""Estimates of the gradient noise compared with known noise, the advice, and the picture."""

from __future__ import annotations

import math
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore.dataset import NumpySlicesDataset

from gaccum_ms import AdaptiveAccumulation, FlushAccumulation, GradNoiseScale, WindowMonitor
from gaccum_ms.record.noise_estimate import NoiseEstimate, WindowNoise
from tests.accumulation.test_noise_record import make_step, targets
from tests.support.state import manager


def known_noise(samples, seed=2):
    """Targets of 20 features around the origin, and weights at distance 1 from it: |G|^2 = 1, and tr Sigma = 40."""
    random = np.random.default_rng(seed)
    deviations = np.sqrt(np.arange(1, 21) * 40 / 210)
    return (random.normal(size=(samples, 20)) * deviations).astype(np.float32), np.full(20, 20**-0.5, np.float32)


def fit(step, y, batch, *callbacks):
    ms.Model(step).train(1, NumpySlicesDataset((y,), shuffle=False).batch(batch), callbacks=list(callbacks))


def test_on_a_quadratic_problem_the_estimate_is_near_the_truth(capsys):
    """In windows of two batches, with ragged micro-batches."""
    samples = 2592
    y, weight = known_noise(samples)
    noise, plain, monitor = GradNoiseScale(smoothing=0.9995), GradNoiseScale(), WindowMonitor()
    fit(make_step(weight=weight, micro_batch_size=5, accumulation_steps=2), y, 16, noise, plain, monitor)
    assert noise.noise_scale == pytest.approx(40, rel=0.2)
    assert len(noise.records) == samples // 32
    assert noise.records[-1] == (samples // 32, 32, noise.noise_scale)
    assert capsys.readouterr().out == f"{noise.advice}\n{plain.advice}\n"
    assert [record.noise_scale for record in monitor.records] == [record.noise_scale for record in plain.records]


def test_estimates_are_unbiased_for_unequal_counts():
    """The two formulas, applied to expected values: |G|^2 = 2 and tr Sigma = 12; micro-batches of 1, 5 and 18 items; on
    one rank or weighted by items, and of 6 and 18 items on two ranks with equal weight."""
    squares = sum(items * (2 + 12 / items) for items in (1, 5, 18))
    effective = 2**2 / (1 / 6 + 1 / 18)
    for items in (24, effective):
        noise = WindowNoise(squares, 3, 24, 2 + 12 / items, items)
        assert noise.variance == pytest.approx(12)
        assert noise.true_square_norm == pytest.approx(2)


def test_older_windows_weigh_less():
    estimate = NoiseEstimate(0.5)
    assert math.isnan(estimate.noise_scale)
    for variance, expected in ((12, 12 / 2), (12, 12 / 2), (40, (9 + 40) / (1.5 + 2))):
        estimate.add(WindowNoise(8 * 2 + 4 * variance, 4, 8, 2 + variance / 8, 8))  # |G|^2 is 2
        assert estimate.noise_scale == pytest.approx(expected)


def advice(scale, batch, batches=1):
    noise = GradNoiseScale()
    window = WindowNoise(batch + 2 * scale, 2, batch, 1 + scale / batch, batch)  # |G|^2 is 1, tr Sigma the scale
    noise.on_window_end(None, SimpleNamespace(noise=window, update=1, batches=batches))
    assert noise.noise_scale == pytest.approx(scale)
    assert noise.advice.isascii(), "another character may raise at the end of the training, when it is printed"
    return noise.advice


def test_the_advice_is_one_line():
    assert advice(1600, 256) == "batch 256 is 6 times below the critical size 1,600: accumulate over 6"
    assert advice(1600, 256, batches=3).endswith(": accumulate over 19")
    assert advice(1583, 1000) == "batch 1,000 is 1.6 times below the critical size 1,600: accumulate over 2"
    above = "batch 256 is 3 times above the critical size 80: a smaller one learns nearly as much from each update"
    assert advice(80, 256) == above
    assert advice(200, 256) == "batch 256 is near the critical size 200: keep it"
    assert advice(0, 256) == "batch 256 has no noise that can be told: a smaller one learns as much from each update"
    assert GradNoiseScale().advice.startswith("the gradient noise is not known")


def test_one_micro_batch_tells_nothing(pynative, capsys):
    noise, monitor = GradNoiseScale(), WindowMonitor()
    fit(make_step(micro_size=1), targets(8), 4, noise, monitor)
    assert math.isnan(noise.noise_scale) and math.isnan(monitor.records[0].noise_scale)
    assert "no window of at least two micro-batches" in capsys.readouterr().out


def test_each_window_counts_once_and_a_dropped_one_not_at_all(pynative):
    y = targets(10)
    y[5] = np.inf
    noise = GradNoiseScale()
    # windows of samples 0-3; 4-7, dropped; 8-9, flushed, a single micro-batch
    step = make_step(micro_size=1, accumulation_steps=2, scale_sense=manager())
    fit(step, y, 2, noise, FlushAccumulation())
    assert [record.update for record in noise.records] == [1, 2]
    assert [record.batch_size for record in noise.records] == [4, 2]
    assert noise.records[0].noise_scale == noise.records[1].noise_scale
    assert math.isfinite(noise.noise_scale)


def test_bad_smoothing_is_refused():
    with pytest.raises(ValueError, match=r"'smoothing' must be at least 0 and below 1, but got 1\.0"):
        GradNoiseScale(1.0)


@pytest.mark.parametrize("kind", [GradNoiseScale, AdaptiveAccumulation])
def test_a_step_without_records_is_refused(kind):
    step = make_step(micro_size=2, record_noise=False)
    with pytest.raises(ValueError, match=f"For '{kind.__name__}', .* record_noise=True"):
        fit(step, targets(8), 4, kind())
