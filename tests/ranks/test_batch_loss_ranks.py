"""WithBatchLossCell on two real processes: the loss of all ranks' samples."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.ranks.batch_loss_worker import PER_RANK, UPDATES
from tests.support import contrastive
from tests.support.contrastive import batches, whole
from tests.support.modes import eagerly
from tests.support.reference import relative_error
from tests.support.two_ranks import case, results_of

pytestmark = pytest.mark.distributed
TOLERANCE = 1e-5


ranks = results_of("batch_loss_worker")


def error(one: dict, other: dict) -> float:
    assert one.keys() == other.keys()
    return max(relative_error(one[name], other[name]) for name in one)


@functools.cache
@eagerly()
def joined(kind: str) -> dict[str, np.ndarray]:
    """The results of one process, with MindSpore's own step on the joined batches of both ranks."""
    run = contrastive.train(whole, kind, batches(kind, 2 * PER_RANK, UPDATES))
    return {"losses": run.losses, **run.state}


@pytest.mark.parametrize(("name", "kind"), [("gathered", "towers"), ("gathered, labels", "labels")])
def test_gathered_equals_one_process_on_the_joined_batch(ranks, name, kind):
    """The loss, the weights and the loss's temperature are equal, without gradients_mean and with it."""
    for results in ranks:
        assert error(case(results, name), joined(kind)) < 2 * TOLERANCE


def test_batches_of_unequal_size_are_refused_on_both_ranks_and_training_goes_on(ranks):
    losses = []
    for results in ranks:
        outcome = case(results, "left out")
        assert "batches of the same size" in str(outcome["message"])
        assert "got [5, 6] samples on the ranks" in str(outcome["message"])
        assert outcome["unequal left all"]
        assert outcome["sound"]
        losses.append(float(outcome["loss"]))
    assert losses == pytest.approx([joined("towers")["losses"][0]] * 2, rel=TOLERANCE)


def test_an_overflow_on_one_rank_skips_on_both(ranks):
    for results in ranks:
        assert case(results, "left out")["overflow"]
        assert case(results, "left out")["overflow left all"]


def test_a_network_made_before_the_parallel_mode_was_set_is_refused(ranks):
    for results in ranks:
        assert "got 1 rank(s) then and 2 now" in str(results["early"])
