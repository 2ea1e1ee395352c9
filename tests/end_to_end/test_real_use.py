"""A text classifier through Model.train on two ranks, with two callbacks; real_use_worker.py trains it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.reference import relative_error
from tests.support.two_ranks import case, results_of

pytestmark = pytest.mark.distributed

UPDATES = 18  # 6 epochs of 12 batches, in windows of 5, 5 and, flushed, 2


ranks = results_of("real_use_worker")


def test_text_classifier_with_flush_and_progress_bar_equals_one_batch_for_each_window(ranks):
    both = [case(results, "text") for results in ranks]
    np.testing.assert_array_equal(both[0]["weights"], both[1]["weights"])
    whole = case(ranks[0], "whole text")
    for results in both:
        assert int(results["updates"]) == UPDATES
        assert float(results["accuracy"]) > 0.9
        # Adam divides by the gradient's own size, which magnifies rounding more than SGD does.
        assert relative_error(results["weights"], whole["weights"]) < 1e-3
    last = [str(results["drawn"]).split("\r")[-1] for results in both]
    assert "Epoch 6/6 |###" in last[0]
    assert ", loss 0." in last[0] and f"update {UPDATES}" in last[0]
    assert last[1] == "", "only one rank draws"
