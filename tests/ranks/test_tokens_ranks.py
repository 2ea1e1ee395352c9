"""Micro-batches by length on two ranks, each with its own number of them: two real processes against MindSpore's own
step on all samples of a window. That ranks agree on a number of tokens which is found, as on a number of samples, is in
training/test_auto_size.py and memory/test_search.py."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ranks.tokens_worker import NUMBER, STEPS, data_of
from tests.splitting.test_max_tokens import run, whole_step
from tests.support.reference import relative_error, vector
from tests.support.two_ranks import case, results_of

pytestmark = pytest.mark.distributed


trained = results_of("tokens_worker")


def windows():
    """The batches of both ranks in each window, as one padded batch."""
    ranks = [data_of(rank) for rank in range(2)]
    of_windows = [
        [batch for data in ranks for batch in data[start : start + STEPS]] for start in range(0, NUMBER, STEPS)
    ]
    return [tuple(map(np.concatenate, zip(*window, strict=True))) for window in of_windows]


def test_a_window_equals_all_its_samples_on_one_process(trained, pynative):
    """Ranks are weighted by the tokens that count, and rank 1 has several times as many as rank 0."""
    both = [case(results, "window") for results in trained]
    assert (both[0]["micro-batches"] < both[1]["micro-batches"]).all()
    step = whole_step()
    losses = run(step, windows())
    for got in both:
        assert relative_error(got["weights"], vector(step.weights)) < 1e-5
        assert int(got["updates"]) == len(losses)
        assert float(got["loss"]) == pytest.approx(losses[-1], rel=1e-5)
        np.testing.assert_array_equal(got["weights"], both[0]["weights"])
