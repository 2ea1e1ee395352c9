"""Forecasts from the results of trials, including trials that the limit ended. No trial runs here."""

from __future__ import annotations

import pytest
from mindspore import Tensor, nn

from gaccum_ms import GradAccumulationCell
from gaccum_ms.memory.forecast import Forecast
from gaccum_ms.memory.search import _beyond, _largest
from gaccum_ms.training.step import step_on_trial
from tests.support.reference import OPTIMIZERS, batches, make_network

MB = 1_000_000


def forecast(limit: int, measured: dict[int, int | None], ended: dict[int, int], samples: int = 32) -> Forecast:
    """A forecast from these results: sizes in samples, memory in MB."""
    network = make_network("dense")
    cell = GradAccumulationCell(nn.WithLossCell(network, nn.CrossEntropyLoss()), 1)
    batch = [Tensor(value) for value in batches(samples, 1)[0]]
    made = Forecast("test", cell, OPTIMIZERS["sgd"](network.trainable_params()), batch, step_on_trial, limit * MB)
    made.measured = {size: found and found * MB for size, found in measured.items()}
    made._ended = {size: reached * MB for size, reached in ended.items()}
    return made


EVEN = {2: 640, 4: 650}  # 5 MB for each sample: 8 samples are predicted to need 670


@pytest.mark.parametrize(
    ("limit", "reached", "fits"),
    [
        (690, 665, True),  # the trial ended below the prediction, which leaves at least 1.5 % of the limit
        (690, 675, False),  # the trial reached more than the prediction, which is therefore wrong
        (675, 665, False),  # the prediction leaves less than 1.5 %
    ],
)
def test_a_trial_that_ended_near_the_limit_may_have_fitted(limit, reached, fits):
    assert forecast(limit, {**EVEN, 8: None}, {8: reached}).may_fit(8) is fits


def test_it_takes_a_measurement_of_half_the_samples():
    assert forecast(720, {**EVEN, 8: None}, {8: 665}).may_fit(8)
    assert not forecast(720, {**EVEN, 16: None}, {16: 665}).may_fit(16)


def test_a_ragged_size_is_not_taken_untested_by_what_even_ones_need():
    """32 samples in sevens leave four, for which the graph has a second part: even sizes do not tell its memory."""
    assert not forecast(690, {**EVEN, 7: None}, {7: 640}).may_fit(7)
    assert not forecast(690, {**EVEN, 3: 655, 7: None}, {7: 640}).may_fit(7)  # 3 is less than half of 7
    assert forecast(720, {**EVEN, 5: 665, 7: None}, {7: 640}).may_fit(7)


@pytest.mark.parametrize(
    ("of_four", "needed", "found"),
    [
        (660, 690, 11),  # 11 samples are predicted to need 712 MB, but fit
        (660, None, 8),  # the trial was ended
        (400, 690, 8),  # 11 samples are predicted to need 907 MB: not tried
    ],
)
def test_a_size_far_above_is_tried_if_its_prediction_may_be_wrong(of_four, needed, found, monkeypatch):
    """Eight of 32 samples fit. No size between 8 and 11 divides the batch evenly."""
    made = forecast(700, {4: of_four, 8: 690}, {})
    tried = []
    monkeypatch.setattr(made, "_tried", lambda size, _: tried.append(size) or (needed and needed * MB))
    assert _beyond(made, 8) == found
    assert tried == [11] * (of_four == 660)


@pytest.mark.parametrize(("needed", "found"), [(1208, 512), (1225, 256), (None, 256)])
def test_an_even_size_is_tried_if_it_is_predicted_to_need_a_little_too_much(needed, found, monkeypatch):
    """512 samples are predicted to need 1224 MB, of which 1222 MB are used."""
    made = forecast(1228, {4: 1149, 256: 1186.5}, {}, samples=512)
    tried = []
    monkeypatch.setattr(made, "_tried", lambda size, _: tried.append(size) or (needed and needed * MB))
    made.always_accumulates = True  # as with "auto": the whole batch has no graph of its own
    assert not made.may_fit(512)
    assert _beyond(made, 256) == found
    assert tried == [512]


def test_a_ragged_size_is_tried_beyond_an_even_one_that_reached_the_limit(monkeypatch):
    made = forecast(700, {3: 660, 6: 670, 8: None}, {8: 699})
    tried = []
    monkeypatch.setattr(made, "_tried", lambda size, _: tried.append(size) or 690 * MB)
    assert _beyond(made, 6) == 11
    assert tried == [11]


def test_no_size_is_tried_beyond_one_that_failed_for_another_reason(monkeypatch):
    made = forecast(700, {3: 660, 6: 670, 8: None}, {})
    monkeypatch.setattr(made, "_tried", None)
    assert _beyond(made, 6) == 6


def test_no_trial_is_far_larger_than_what_fits(monkeypatch):
    """Two samples happen to need more than four, so the first line falls: by it, all 16384 samples would fit."""
    made = forecast(700, {}, {}, samples=16384)
    needed = {}

    def tried(size, _):
        needed[size] = 586 * MB if size == 2 else 581 * MB + size * MB // 50
        return needed[size] if needed[size] <= made.limit else None

    monkeypatch.setattr(made, "_tried", tried)
    assert _largest(made) == 5462
    assert all(size <= 64 * max(other for other in needed if other < size) for size in needed if size > 4)
    assert max(needed.values()) <= 1.1 * made.limit  # without the bound, 909 MB
