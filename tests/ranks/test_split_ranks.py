"""A function as ``split=`` on two ranks with different numbers of micro-batches: two real processes compared with
MindSpore's own step on each window's joined samples."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from tests.ranks.split_worker import NUMBER, SPLITS, data_of
from tests.support.reference import Regression, relative_error, vector
from tests.support.two_ranks import case, results_of

pytestmark = pytest.mark.distributed
TOLERANCE = 1e-5


def windows_of(name):
    """The batches of both ranks in each window, as one batch."""
    steps, ranks = SPLITS[name][2].get("accumulation_steps", 1), [data_of(name, rank) for rank in range(2)]
    windows = []
    for start in range(0, NUMBER, steps):
        of_window = [one for data in ranks for one in data[start : start + steps]]
        windows.append(tuple(np.concatenate(column) for column in zip(*of_window, strict=True)))
    return [one for one in windows if np.isfinite(one[0]).all()]


def whole(name, rate):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    network = Regression()
    step = nn.TrainOneStepCell(network, nn.Momentum(network.trainable_params(), rate, 0.9)).set_train()
    losses = [float(step(*map(Tensor, batch)).asnumpy()) for batch in windows_of(name)]
    return losses, vector(network.get_parameters())


trained = results_of("split_worker")


@pytest.mark.parametrize("name", SPLITS)
def test_a_window_equals_all_its_batches_on_one_process(trained, name):
    """Ranks are weighted by samples, as in windows of several batches, or by counts. With counts, they resume in
    mid-window. A window that overflowed on rank 1 is left out on both."""
    summed = 1 if SPLITS[name][1] or name == "count" else 2
    losses, weights = whole(name, summed * 0.05)
    for results in trained:
        got = case(results, name)
        assert relative_error(got["weights"], weights) < TOLERANCE
        assert int(got["updates"]) == len(losses)
        np.testing.assert_array_equal(got["weights"], case(trained[0], name)["weights"])
    if name == "count":
        assert float(got["loss"]) == pytest.approx(losses[-1], rel=TOLERANCE)
        assert [int(case(results, name)["graphs"]) for results in trained] == [1, 2]
        assert float(got["count"]) == pytest.approx(windows_of(name)[-1][2].sum())
