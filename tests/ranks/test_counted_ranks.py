"""Counts, several losses, loss scaling and overflow on two ranks with unequal counts, against NumPy: windows on one
process, each with the batches of both ranks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.ranks.counted_worker import FIELDS, KINDS, WINDOWS, data
from tests.support import window_oracle as oracle
from tests.support.two_ranks import case, results_of

pytestmark = pytest.mark.distributed

ranks = results_of("counted_worker")


@pytest.mark.parametrize("name", KINDS)
def test_equals_all_items_in_one_window(ranks, name):
    """The records say what all ranks counted. Without counts, each rank's loss is its own, as in MindSpore."""
    plan, both = dataclasses.replace(KINDS[name].plan, steps=2), [case(results, name) for results in ranks]
    expected, weight = oracle.expected_records(plan, [data(name)])
    assert len(expected) == WINDOWS
    for got in both:
        for field in FIELDS:
            wanted = np.array([one[field] for one in expected], float)
            if field != "loss" or name != "dropped samples":
                finite = (np.where(np.isfinite(values), values, np.nan) for values in (got[field], wanted))
                np.testing.assert_allclose(*finite, rtol=1e-5, err_msg=field)
        np.testing.assert_allclose(got["weight"], weight, rtol=1e-5)
    np.testing.assert_array_equal(both[0]["weight"], both[1]["weight"])


def test_a_bad_count_on_one_rank_is_an_error_on_both_and_training_goes_on(ranks):
    for results in ranks:
        got = case(results, "bad counts")
        assert all("'count'" in error for error in got["errors"])
        assert got["same"].all()
        np.testing.assert_allclose(got["weight"], 0.9, rtol=1e-6)  # from 1, with the gradient 1 and the rate 0.1


def test_one_reduction_per_update(ranks):
    """One buffer has the weight's gradient and the window's three sums. Two losses' counts are sent before the loop."""
    for results in ranks:
        got = case(results, "reductions")
        assert got["samples"].tolist() == [1] * 2
        assert got["count"].tolist() == [1 + 3] * 2
        assert got["two losses"].tolist() == [2, 1 + 2] * 2
