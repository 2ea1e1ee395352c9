"""Which sizes are tried, what is predicted of others, and which size is found, with trials whose memory is known. No
trial runs here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mindspore import Tensor, nn

from gaccum_ms import AutoSize, GradAccumulationCell
from gaccum_ms.memory.forecast import Forecast
from gaccum_ms.memory.trial import Trials, even_sizes
from tests.support.reference import OPTIMIZERS, batches, make_network

MB = 1_000_000


@pytest.fixture
def forecast(monkeypatch):
    """Makes a forecast of a memory limit in MB, for a cell that finds its size, which always accumulates. `needs` : the
    MB of a size, or None, if it is out of memory in another way."""

    def make(samples: int, limit: float, needs: Callable[[int], float | None], size: object = "auto") -> Forecast:
        def run(trials: Trials, size: int) -> tuple[int, int]:
            peak = needs(size)
            if peak is None or peak > limit:
                raise MemoryError
            return round(peak * MB), 0

        monkeypatch.setattr(Trials, "run", run)
        network = make_network("dense")
        options = {"micro_batch_size": AutoSize()} if size == "auto" else {"micro_size": 1}
        cell = GradAccumulationCell(nn.WithLossCell(network, nn.CrossEntropyLoss()), **options)
        batch = [Tensor(value) for value in batches(samples, 1)[0]]
        optimizer = OPTIMIZERS["sgd"](network.trainable_params())
        return Forecast(Trials("test", cell, optimizer, batch, lambda *_: None, int(limit * MB)))

    return make


def found(forecast: Forecast) -> int:
    while (size := forecast.next_size()) is not None:
        assert size not in [*forecast.measured, *forecast.failed]
        forecast.measure(size)
    return forecast.found()


def needed(samples: int, size: int, each: float, last: float = 0) -> float:
    """MB of a training, of which `each` for a sample in the graph, and `last` for a smaller last micro-batch."""
    return 600 + each * (size + samples % size) + last * (samples % size > 0)


@pytest.mark.parametrize(("samples", "last"), [(1, 0), (97, 0), (360, 50)])
@pytest.mark.parametrize("each", [0.7, 40])
@pytest.mark.parametrize("limit", [605, 650, 3000])
def test_no_trial_exceeds_the_limit_and_what_is_found_is_85_percent_of_what_fits(samples, last, each, limit, forecast):
    """Except for the first two trials of each kind, before there is a line. What fits keeps 1.5 % of the limit free."""
    made = forecast(samples, limit, lambda size: needed(samples, size, each, last))
    fits = [size for size in even_sizes(samples) if needed(samples, size, each, last) <= 0.985 * limit]
    size = found(made)
    assert size in fits or not fits
    assert size >= 0.85 * max(fits, default=0)
    first_ragged = [size for size in even_sizes(samples) if samples % size][:2]
    assert {*made.failed} <= {1, 2, *first_ragged}
    assert len(made.measured) + len(made.failed) <= 2 * samples.bit_length()


@pytest.mark.parametrize(("samples", "expected"), [(64, [1, 2, 4, 8, 16, 32]), (97, [1, 2, 4, 8, 14, 20])])
def test_sizes_double_and_a_size_is_tried_only_if_it_is_predicted_to_fit(samples, expected, forecast):
    """64 of 64 samples would need 664 MB. Of 97 samples, sizes of 25 leave 22 for the last: 47 are in the graph."""
    made = forecast(samples, 650, lambda size: needed(samples, size, 1))
    found(made)
    assert list(made.measured) == expected


def test_what_is_beyond_a_wrong_prediction_is_bisected(forecast):
    """A kernel takes 200 MB more for more than 16 samples; or memory is out in another way, of which no size tells."""
    made = forecast(360, 700, lambda size: 600 + size + 200 * (size > 16))
    assert found(made) == 15
    assert list(made.measured)[:5] == [1, 2, 4, 8, 15]
    assert made.failed[0] == 30
    assert found(forecast(64, 700, lambda size: None if size > 20 else 600)) == 16
    assert found(forecast(64, 700, lambda size: None if size > 30 else 600)) == 22
    assert found(forecast(64, 700, lambda size: None)) == 0


def test_a_batch_in_one_micro_batch_needs_no_accumulators(forecast):
    """Of 16 samples, eight need too much with accumulators, and all of them not quite too much without."""
    accumulators = 293 * 4 / MB

    def needs(size):
        return 600 + 100 * size / 16 * accumulators - accumulators * (size == 16)

    assert found(forecast(16, (600 + 99.5 * accumulators) / 0.985, needs, size=1)) == 16
    assert found(forecast(16, (600 + 98.5 * accumulators) / 0.985, needs, size=1)) == 8


def test_what_only_its_trial_exceeds_is_found_by_its_prediction(forecast, monkeypatch):
    """Each sample adds 10 MB, and a trial needs 30 MB more, which leaves no room for one of 16 samples."""
    made = forecast(64, 780, lambda size: 600 + 10 * size)
    monkeypatch.setattr(Trials, "run", lambda self, size: ((600 + 10 * size) * MB, 30 * MB))
    assert found(made) == 16
    assert max(made.measured) == 10
