"""Transforms on two ranks, compared with the joined batches on one process: all ranks decide alike."""

from __future__ import annotations

import numpy as np
import pytest
from support import by_hand
from support.by_hand import ByHand, train_whole
from support.reference import Regression, relative_error
from support.two_ranks import case
from transforms_worker import DECAY, MAX_NORM, NORM, SPIKE, TRAININGS, WINDOWS, data, momentum

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ranks(rank_pair, tmp_path_factory):
    return rank_pair.worker("transforms_worker", tmp_path_factory.mktemp("transforms"))


def whole(steps):
    """Weights after each window, and averages, of one process on the batches of both ranks."""
    parts = [data(rank, steps) for rank in (0, 1)]
    windows = [
        tuple(np.concatenate(column) for column in zip(*(parts[0][at : at + steps] + parts[1][at : at + steps])))  # noqa: B905
        for at in range(0, WINDOWS * steps, steps)
    ]
    network = Regression()
    optimizer = ByHand(momentum(network, False), [by_hand.spikes(norm=NORM), by_hand.global_norm(MAX_NORM)])
    average = by_hand.Average(optimizer.weights(), DECAY)
    optimizer.after.append(average)
    rows = train_whole(network, optimizer, windows)
    return rows, np.concatenate([one.ravel() for one in average.values])


@pytest.mark.parametrize("name", [*TRAININGS, "accumulator"])
def test_ranks_decide_alike_and_as_one_process(ranks, name):
    rows, averages = whole(TRAININGS[name][1] if name in TRAININGS else 2)
    both = [case(one, name) for one in ranks]
    for one in both:
        assert one["updates"].tolist() == [number + (number < SPIKE) for number in range(WINDOWS)]
        assert one["skipped"] == 1
        assert max(map(relative_error, one["weights"], rows)) < 1e-5
        assert relative_error(one["averages"], averages) < 1e-5
        np.testing.assert_array_equal(one["swapped"], one["averages"])
    for what in ("weights", "averages", "norm"):
        np.testing.assert_array_equal(both[0][what], both[1][what])


def test_ranks_whose_norms_differ_decide_by_their_mean(ranks):
    for one in ranks:
        found = case(one, "disagree")
        assert (int(found["below"]), int(found["above"])) == (0, 1)
