"""AdaptiveAccumulation: numbers of batches and rates for a known noise scale."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore.dataset import NumpySlicesDataset

from gaccum_ms import AdaptiveAccumulation, FlushAccumulation, WindowMonitor, resume
from gaccum_ms.learning_rate import current_learning_rate
from tests.accumulation import test_noise_record
from tests.callbacks.test_noise_scale import known_noise
from tests.support.reuse import Reused
from tests.support.two_ranks import case

RATE = 1e-6  # so small that the weights, and the noise scale of 40, hardly change


def make_step(rate=RATE, **options):
    _, weight = known_noise(1)
    return test_noise_record.make_step(rate, weight=weight, **{"micro_size": 4, **options})


@Reused
def reused_step(**options):
    step = make_step(**options)
    step.let_windows_span_batches()  # as the callback does, before it trains
    return step


def fit(callback, samples=8000, batch=8, model=None, callbacks=(), seed=2, **options):
    model = model or ms.Model(reused_step(**options))
    y, _ = known_noise(samples, seed)
    callbacks = [callback, *callbacks, FlushAccumulation(each_epoch=False)]
    model.train(1, NumpySlicesDataset((y,), shuffle=False).batch(batch), callbacks=callbacks)
    return model.train_network


def steps_of(callback):
    return [record.accumulation_steps for record in callback.records]


def test_windows_grow_to_the_noise_scale_and_the_rate_follows():
    """A batch of 8 samples grows to about 40, by doubling; the final number of batches is within the tolerance of 5."""
    callback = AdaptiveAccumulation(smoothing=0.999)
    monitor = WindowMonitor()
    step = fit(callback, samples=1200, callbacks=[monitor])
    steps = steps_of(callback)
    assert steps[:2] == [2, 4]
    assert 5 / 1.5 < steps[-1] < 5 * 1.5
    assert len(steps) <= 4
    assert int(step.accumulation_steps.asnumpy()) == steps[-1]
    rates = [RATE * number for number in steps]
    np.testing.assert_allclose([record.learning_rate for record in callback.records], rates, rtol=1e-5)
    np.testing.assert_allclose(current_learning_rate(step.optimizer), rates[-1], rtol=1e-5)
    # each change comes between two windows, at a comparison, and matches its record
    assert all(record.update % 20 == 0 for record in callback.records)
    sizes = {record.update: (record.batches, record.count, record.learning_rate) for record in monitor.records}
    for before, record in zip([1, *steps], callback.records, strict=False):
        assert sizes[record.update][:2] == (before, 8 * before) == (before, record.batch_size)
        assert record.noise_scale > 1.5 * record.batch_size
        batches, _, rate = sizes[record.update + 1]
        assert (batches, pytest.approx(rate, rel=1e-5)) == (record.accumulation_steps, record.learning_rate)


@pytest.mark.parametrize(
    ("options", "own", "expected"),
    [
        ({"max_steps": 3}, {}, [2, 3]),
        ({"tolerance": 8.0}, {}, []),
        ({"target": 0.5, "min_steps": 3}, {}, [3]),
        ({"target": 0.2}, {"micro_size": 1, "accumulation_steps": 8}, [4, 2]),
    ],
    ids=["most", "tolerance", "least", "one micro-batch is not enough"],
)
def test_bounds(options, own, expected):
    """A window of a single micro-batch gives no estimate: such windows would stay for ever."""
    callback = AdaptiveAccumulation(smoothing=0.999, **options)
    fit(callback, samples=2560 if own else 1200, **own)  # windows of the last number of batches are compared too
    assert steps_of(callback) == expected


def test_a_resumed_step_goes_on_with_its_number_and_rate(tmp_path):
    step = fit(AdaptiveAccumulation(max_steps=4, smoothing=0.999), samples=600)
    assert int(step.accumulation_steps.asnumpy()) == 4
    ms.save_checkpoint(step, str(tmp_path / "step.ckpt"))
    model, callback = ms.Model(reused_step()), AdaptiveAccumulation(max_steps=4, smoothing=0.999)
    assert int(model.train_network.accumulation_steps.asnumpy()) == 1
    resume(model, tmp_path / "step.ckpt")
    step = fit(callback, model=model, samples=800)
    assert steps_of(callback) == []
    assert int(step.window_steps.asnumpy()) == 4
    np.testing.assert_allclose(current_learning_rate(step.optimizer), RATE * 4, rtol=1e-5)


@pytest.mark.distributed
def test_two_ranks_do_the_same(rank_pair, tmp_path):
    """Rank 1's own estimate differs; without agreement the ranks would wait for each other for ever."""
    results = rank_pair.worker("tests.ranks.callbacks_worker", tmp_path)
    for name in ("follow", "astray"):
        first, second = (case(rank, name) for rank in results)
        assert first["steps"].tolist() == second["steps"].tolist() == [2]  # 2 * 16 of 40
        assert first["rates"].tolist() == second["rates"].tolist()
        assert first["weight"].tolist() == second["weight"].tolist()
    assert case(results[0], "astray")["scale"] < case(results[1], "astray")["scale"] / 5
    for rank in results:
        message = str(case(rank, "uneven")["message"])
        assert "all ranks must have the same number of batches" in message
        assert "[3, 2] batches" in message


def test_bad_arguments_are_refused():
    for options, error, text in (
        ({"target": float("inf")}, ValueError, "'target' must be positive and finite, but got inf"),
        ({"tolerance": 1.0}, ValueError, "'tolerance' must be larger than 1, but got 1.0"),
        ({"tolerance": True}, TypeError, "'tolerance' must be a float, but got True"),
        ({"min_steps": 4, "max_steps": 2}, ValueError, "must not be less than 'min_steps', but got 2 and 4"),
        ({"interval": 0}, ValueError, "'interval' must be at least 1, but got 0"),
    ):
        with pytest.raises(error, match=f"^For 'AdaptiveAccumulation', .*{text}"):
            AdaptiveAccumulation(**options)
