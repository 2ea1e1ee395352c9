"""Fewer ranks, and more, that go on with the same samples in each update: real processes, compared with a training that
nothing interrupted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.ranks.fewer_ranks_worker import SEEN, UPDATES, go_on, train_and_save
from tests.support.reference import relative_error
from tests.support.two_ranks import Results, case

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(rank_pair, out) -> list[Results]:
    return rank_pair.worker("tests.ranks.fewer_ranks_worker", out)


def samples_of_updates(*ranks: Results) -> list[list[float]]:
    rows = np.concatenate([results["seen"] for results in ranks])
    return [sorted(rows[rows[:, 0] == update, 1]) for update in np.unique(rows[:, 0])]


def assert_same_updates(got: list[Results], unbroken: list[Results], seen: int) -> None:
    """The later updates have the same samples, to the last one, and the weights are equal to rounding."""
    for results in got:
        assert results["updates"] == unbroken[0]["updates"] == UPDATES
        assert relative_error(results["weights"], unbroken[0]["weights"]) < 1e-5
    expected = samples_of_updates(*unbroken)[seen // 16 :]
    here = samples_of_updates(*got)
    assert len(here) == len(expected)
    assert here[1:] == expected[1:]
    assert set(here[0]) <= set(expected[0])  # the update whose window was open
    assert len(here[0]) == 16 - seen % 16


@pytest.mark.parametrize("place", ["in mid-window", "in the second epoch"])
def test_one_process_goes_on_from_two_ranks_as_if_not_interrupted(out, ranks, place):
    unbroken = [case(results, "two ranks") for results in ranks]
    assert_same_updates([go_on(out, place, 2, 0, 1)], unbroken, SEEN[place])


def test_two_ranks_go_on_from_one_process_as_if_not_interrupted(out, ranks):
    unbroken = train_and_save(out, 0, 1)
    for place in ("in mid-window", "between windows"):
        assert_same_updates([case(results, place) for results in ranks], [unbroken], SEEN[place])
