"""AdaScale: gains and rates against the paper's formulas in NumPy, its two limits, and checkpoints."""

from __future__ import annotations

import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.dataset import NumpySlicesDataset

from gaccum_ms import AdaScale, FlushAccumulation, resume
from gaccum_ms.learning_rate import current_learning_rate
from tests.accumulation.test_noise_record import make_step, targets
from tests.support.reference import as_numpy

START = np.array([1.0, -0.5, 2.0], np.float32)
RATE = 0.05


def make_model(rate=RATE, **options):
    return ms.Model(make_step(rate, weight=START, **{"micro_size": 4, **options}))


def fit(y, batch, callback, epochs=1, model=None, callbacks=(), **options):
    model = model or make_model(**options)
    data = NumpySlicesDataset((y,), shuffle=False).batch(batch)
    model.train(epochs, data, callbacks=[callback, *callbacks])
    return model.train_network


def adascale(windows, smoothing, schedule=lambda steps: 1.0, rate=RATE):
    """The paper's algorithm for micro-batches of equal size. The gain is one update late, and the variance is computed
    from the first micro-batch only. Returns the weights, the gains and the progress."""
    weight, gain, progress = START.astype(np.float64), 1.0, 0.0
    variance = square = total = 0.0
    gains, progresses = [], []
    for parts in windows:
        number = len(parts)
        gradients = np.stack([weight - part.mean(axis=0) for part in parts])
        mean = gradients.mean(axis=0)
        weight = weight - rate * gain * schedule(int(progress)) * mean
        progress += gain
        own_variance = (np.square(gradients[0]).sum() - np.square(mean).sum()) / (1 - 1 / number)
        own_square = np.square(mean).sum() - own_variance / number
        variance = smoothing * variance + (1 - smoothing) * own_variance
        square = smoothing * square + (1 - smoothing) * own_square
        total = smoothing * total + 1 - smoothing
        sigma, mu = max(variance / total, 0), max(square / total, 0)
        gain = (sigma + mu) / (sigma / number + mu)
        gains.append(gain)
        progresses.append(progress)
    return weight, gains, progresses


@pytest.mark.parametrize(
    ("options", "batch", "smoothing"),
    [({}, 8, None), ({"accumulation_steps": 2, "micro_size": 2}, 4, 0.5)],
    ids=["micro-batches", "spanning"],
)
def test_rates_follow_the_paper(options, batch, smoothing, pynative):
    y = 3 * targets(48)  # noisy enough for an estimate from each window
    callback = AdaScale(smoothing=smoothing)
    step = fit(y, batch, callback, **options)
    windows = y.reshape(6, 4, 2, 3)
    weight, gains, progresses = adascale(windows, 0.996 if smoothing is None else smoothing)
    assert len({round(gain, 3) for gain in gains}) > 3
    assert 1 <= min(gains) < max(gains) <= 4
    np.testing.assert_allclose([record.gain for record in callback.records], gains, rtol=1e-4)
    np.testing.assert_allclose([record.progress for record in callback.records], progresses, rtol=1e-4)
    np.testing.assert_allclose(as_numpy(step.weights[0]), weight, rtol=1e-4)
    np.testing.assert_allclose(current_learning_rate(step.optimizer), RATE * gains[-1], rtol=1e-4)
    # a negative control: these weights are not those of the plain rate
    assert np.abs(weight - adascale(windows, 0.5, lambda steps: 0.5)[0]).max() > 1e-2


def test_without_noise_the_gain_is_one_and_of_noise_alone_it_is_the_number_of_micro_batches(pynative):
    callback = AdaScale()
    fit(np.ones((32, 3), np.float32), 8, callback)
    assert [record.gain for record in callback.records] == pytest.approx([1] * 4, abs=1e-5)
    assert callback.progress == pytest.approx(4, abs=1e-4)
    # The micro-batches' gradients cancel: the window's gradient is zero, and no estimate of the true one is positive.
    y = START + np.repeat(np.array([1, -1, 2, -2], np.float32), 2)[:, None] * np.ones((8, 3), np.float32)
    callback = AdaScale()
    fit(np.tile(y, (4, 1)), 8, callback)
    assert [record.gain for record in callback.records] == pytest.approx([4] * 4, abs=1e-5)


def test_schedule_and_stop_count_scale_invariant_steps(pynative):
    y = 3 * targets(80)

    def halved(steps):
        return 0.5 if steps >= 4 else 1.0

    callback = AdaScale(halved, steps=8.0, smoothing=0.9)
    step = fit(y, 8, callback, epochs=10)
    windows = np.concatenate([y.reshape(10, 4, 2, 3)] * 2)
    _, _, progresses = adascale(windows, 0.9, halved)
    updates = next(number for number, progress in enumerate(progresses, start=1) if progress >= 8)
    assert updates < 8
    assert int(step.update_count.asnumpy()) == updates
    weight, gains, _ = adascale(windows[:updates], 0.9, halved)
    np.testing.assert_allclose(as_numpy(step.weights[0]), weight, rtol=1e-4)
    np.testing.assert_allclose(current_learning_rate(step.optimizer), RATE * 0.5 * gains[-1], rtol=1e-4)


def test_a_flushed_window_has_its_own_number_of_micro_batches(pynative):
    """Two windows of four micro-batches, and one of two; the gradients of each window cancel."""
    y = START + np.repeat(np.array([1, -1, 2, -2, 1, -1, 2, -2, 1, -1], np.float32), 2)[:, None]
    callback = AdaScale()
    fit(y.astype(np.float32), 4, callback, callbacks=[FlushAccumulation()], micro_size=2, accumulation_steps=2)
    assert [record.gain for record in callback.records] == pytest.approx([4, 4, 2], abs=1e-4)


def test_a_checkpoint_keeps_what_the_rate_was_multiplied_by(pynative, tmp_path):
    model, callback = make_model(), AdaScale(lambda steps: 0.5, smoothing=0.5)
    step = fit(targets(24), 8, callback, model=model)
    ms.save_checkpoint(step, str(tmp_path / "step.ckpt"))
    later, fresh = make_model(), AdaScale(lambda steps: 0.5, smoothing=0.5)
    resume(later, tmp_path / "step.ckpt")
    fit(targets(8), 8, fresh, model=later)
    assert fresh.records[0].progress == pytest.approx(callback.progress + callback.gain, rel=1e-5)
    rate = current_learning_rate(later.train_network.optimizer)
    np.testing.assert_allclose(rate, RATE * 0.5 * fresh.gain, rtol=1e-4)


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"schedule": 0.1}, TypeError, "'schedule' must be callable, but got 0.1"),
        ({"steps": "9"}, TypeError, "'steps' must be a float, but got '9'"),
        ({"steps": True}, TypeError, "'steps' must be a float, but got True"),
        ({"steps": 0}, ValueError, "'steps' must be positive and finite, but got 0"),
        ({"smoothing": 1}, ValueError, "'smoothing' must be at least 0 and below 1, but got 1"),
    ],
)
def test_bad_arguments_are_refused(options, error, text):
    with pytest.raises(error, match=re.escape(text)):
        AdaScale(**options)


def test_what_cannot_follow_is_refused_before_training(pynative):
    model = make_model(rate=nn.CosineDecayLR(0.0, 0.1, 10))
    with pytest.raises(ValueError, match="scale_learning_rate"):
        fit(targets(8), 8, AdaScale(), model=model)
    with pytest.raises(ValueError, match="'schedule' must be positive and finite, but got 0"):
        fit(targets(8), 8, AdaScale(lambda steps: 0))
    assert int(model.train_network.update_count.asnumpy()) == 0
