"""Learning rates made for batches: the warning before training, cases without warning, and the conversion."""

from __future__ import annotations

import warnings

import mindspore as ms
import numpy as np
import pytest
from mindspore import Model, Tensor, nn
from mindspore.dataset import NumpySlicesDataset

from gaccum_ms import FlushAccumulation, scale_learning_rate
from tests.accumulation.test_windows import StopAt
from tests.support.reference import Line, make_step

pytestmark = pytest.mark.usefixtures("pynative")  # rates are compared before anything is compiled

BATCHES, EPOCHS, STEPS = 8, 3, 4
ALL = BATCHES * EPOCHS
UPDATES = ALL // STEPS


def data():
    x = np.random.default_rng(0).normal(size=(2 * BATCHES, 1)).astype(np.float32)
    return NumpySlicesDataset((x, 3 * x), shuffle=False).batch(2)


def step_of(rate, steps=STEPS):
    return make_step(Line(1.0), lambda weights: nn.SGD(weights, rate), micro_size=2, accumulation_steps=steps)


STOP = (StopAt(step=1),)  # the rates are compared before the first batch


def warned(step, epochs=EPOCHS, callbacks=STOP):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        Model(step).train(epochs, data(), callbacks=list(callbacks))
    told = [one for one in seen if "must be made for updates" in str(one.message)]
    assert all(one.filename == __file__ for one in told)
    return [str(one.message) for one in told]


@pytest.mark.parametrize("rate", [[0.01] * ALL, nn.CosineDecayLR(0.0, 0.01, ALL)], ids=["list", "schedule"])
def test_rates_for_batches_are_told_before_training_with_both_numbers_and_the_remedy(rate):
    (message,) = warned(step_of(rate))
    assert f"of which {ALL} batches with accumulation_steps={STEPS} make about {UPDATES}" in message
    assert f"rates for {ALL}: " in message
    assert f"scale_learning_rate(rates, {STEPS}, rule='none', per='batch')" in message


def test_flushed_windows_are_counted():
    (message,) = warned(step_of([0.01] * ALL), callbacks=[FlushAccumulation(), *STOP])
    assert f"make about {UPDATES + EPOCHS}," in message


def test_each_training_of_a_step_is_compared_with_all_batches_so_far():
    step = step_of([0.01] * ALL)
    assert not warned(step, epochs=1, callbacks=()), "an epoch of many: nobody can tell"
    assert warned(step, epochs=2)


@pytest.mark.parametrize(
    ("rate", "steps"),
    [
        ([0.01] * UPDATES, STEPS),
        (scale_learning_rate(nn.CosineDecayLR(0.0, 0.01, ALL), STEPS, "none", per="batch"), STEPS),
        (nn.ExponentialDecayLR(0.01, 0.9, ALL), STEPS),  # it never ends
        ([0.01] * ALL, 1),
    ],
    ids=["list", "converted", "exponential", "no window"],
)
def test_other_rates_are_left_alone(rate, steps):
    assert not warned(step_of(rate, steps))


RATES = [0.08, 0.04, 0.06, 0.02, 0.05, 0.01, 0.03]


def test_conversion_by_hand():
    assert scale_learning_rate(RATES, 3, "none", per="batch") == [0.08, 0.02, 0.03]
    assert scale_learning_rate([1.0, 2.0, 3.0], 2, per="batch") == [2.0, 6.0]
    assert scale_learning_rate(0.5, 2, per="batch") == 1.0
    cosine = scale_learning_rate(nn.CosineDecayLR(0.0, 0.05, ALL), STEPS, rule="none", per="batch")
    found = [float(cosine(Tensor(update, ms.int32))) for update in range(UPDATES)]
    expected = [0.025 * (1 + np.cos(np.pi * batch / ALL)) for batch in range(0, ALL, STEPS)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for arguments, why in (
        ({"factor": 1.5, "per": "batch"}, "must be a whole number with per='batch'.*but got 1.5"),
        ({"factor": 2, "per": "epoch"}, "'per' must be"),
        ({"factor": 2, "rule": "None"}, "'rule' must be"),
    ):
        with pytest.raises(ValueError, match=why):
            scale_learning_rate(RATES, **arguments)
