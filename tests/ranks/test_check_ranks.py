"""The proof at the first batch on two ranks: each decides for itself, and none waits for the other."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.two_ranks import case, results_of

pytestmark = pytest.mark.distributed
trained = results_of("check_worker")


def test_each_rank_decides_for_itself_and_they_stay_alike(trained):
    both = [case(results, "trained") for results in trained]
    assert [int(one["texts"]) for one in both] == [0, 1]
    np.testing.assert_array_equal(both[0]["weights"], both[1]["weights"])


def test_a_loss_with_a_collective_is_left_out(trained):
    assert [case(results, "collective")["told"].tolist() for results in trained] == [[0, True], [0, False]]
