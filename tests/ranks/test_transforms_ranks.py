"""Transforms on two ranks, compared with the joined batches on one process: all ranks decide alike."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ranks.transforms_worker import DECAY, MAX_NORM, NORM, SPIKE, STEPS, WINDOWS, data, momentum
from tests.support import by_hand
from tests.support.by_hand import ByHand, train_whole
from tests.support.reference import Regression, relative_error
from tests.support.two_ranks import case, results_of

pytestmark = pytest.mark.distributed


ranks = results_of("transforms_worker")


def whole():
    """The weights after each window and the averages, of one process with the batches of both ranks."""
    parts = [data(rank) for rank in (0, 1)]
    windows = [
        tuple(np.concatenate(column) for column in zip(*(parts[0][at : at + STEPS] + parts[1][at : at + STEPS])))  # noqa: B905
        for at in range(0, WINDOWS * STEPS, STEPS)
    ]
    network = Regression()
    optimizer = ByHand(momentum(network.trainable_params()), [by_hand.spikes(norm=NORM), by_hand.global_norm(MAX_NORM)])
    average = by_hand.Average(optimizer.weights(), DECAY)
    optimizer.after.append(average)
    rows = train_whole(network, optimizer, windows)
    return rows, np.concatenate([one.ravel() for one in average.values])


def test_ranks_decide_alike_and_as_one_process(ranks):
    rows, averages = whole()
    both = [case(one, "step") for one in ranks]
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
        updates = case(one, "disagree")
        assert (int(updates["below"]), int(updates["above"])) == (0, 1)
