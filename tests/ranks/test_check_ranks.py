"""The proof at the first batch on two ranks: each decides for itself, and none waits for the other."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.two_ranks import case, results_of

pytestmark = pytest.mark.distributed
trained = results_of("check_worker")


def test_each_rank_decides_for_itself_and_trains_the_same_bits(trained):
    for rank, results in enumerate(trained):
        got = case(results, "trained")
        for name in ("weights", "loss"):
            np.testing.assert_array_equal(got[f"with/{name}"], got[f"without/{name}"])
        assert (int(got["with/texts"]), int(got["without/texts"])) == (rank, 0)


@pytest.mark.parametrize("name", ["ByOperator", "ByFunction"])
def test_a_loss_with_a_collective_is_left_out(trained, name):
    told = [case(results, name)["told"].tolist() for results in trained]
    assert told == [[0, True], [0, False]]
