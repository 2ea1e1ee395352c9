"""Micro-batches by length on two ranks, each with its own number of them: two real processes against MindSpore's own
step on all samples of a window."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest

from tests.ranks.tokens_worker import KINDS, NUMBER, data_of
from tests.splitting.test_max_tokens import run, whole_step
from tests.support.reference import Clipped, relative_error, vector
from tests.support.two_ranks import case, results_of

pytestmark = pytest.mark.distributed


trained = results_of("tokens_worker")


def windows(steps):
    """The batches of both ranks in each window, as one padded batch."""
    ranks = [data_of(rank) for rank in range(2)]
    of_windows = [
        [batch for data in ranks for batch in data[start : start + steps]] for start in range(0, NUMBER, steps)
    ]
    return [tuple(map(np.concatenate, zip(*window, strict=True))) for window in of_windows]


def whole(steps, max_grad_norm=None):
    """The losses and the last weights of MindSpore's step."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    step = whole_step()
    if max_grad_norm is not None:
        step.grad_reducer = Clipped(max_grad_norm)
    losses = run(step, windows(steps))
    return losses, vector(step.weights)


def assert_as_one_process(results, of_whole):
    losses, weights = of_whole
    for got in results:
        assert relative_error(got["weights"], weights) < 1e-5
        assert int(got["updates"]) == len(losses)
        assert float(got["loss"]) == pytest.approx(losses[-1], rel=1e-5)
        np.testing.assert_array_equal(got["weights"], results[0]["weights"])


@pytest.mark.core("window")
@pytest.mark.parametrize("name", KINDS)
def test_a_window_equals_all_its_samples_on_one_process(trained, name):
    """Ranks are weighted by the tokens that count, and rank 1 has several times as many as rank 0. In "halves" rank 1
    alone runs out of memory, in the second batch."""
    _, steps, options = KINDS[name]
    few, many = (case(results, name)["micro-batches"] for results in trained)
    assert (few < many).all()
    assert_as_one_process([case(results, name) for results in trained], whole(steps, **options))


@pytest.mark.thorough
def test_ranks_halve_together(trained):
    """Rank 1 halves at once, and rank 0 from the next window on."""
    tokens = [case(results, "halves")["tokens"].tolist() for results in trained]
    assert tokens == [[96, 96, 48, 48, 48], [96, 48, 48, 48, 48]]


@pytest.mark.thorough
def test_ranks_agree_on_the_smallest_number_that_fits(trained):
    """First, rank 0 finds 60 tokens, three rows of its largest width, and rank 1 finds 24, one row. Then rank 0 finds
    20, one row, and rank 1 keeps its own 24."""
    first, second = (case(results, "search") for results in trained)
    assert first["tokens"].tolist() == [24, 20]
    assert second["tokens"].tolist() == [24, 24]
    np.testing.assert_array_equal(first["losses"], second["losses"])
