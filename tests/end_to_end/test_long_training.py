"""A training that lasts: killed and resumed it is bit-identical, and its memory does not grow. long_training.py runs it
for a day."""

from __future__ import annotations

import pytest

from tests.end_to_end.long_training import EPOCH, STEPS, compare, differences, random_kills

BATCHES, KILLS, UPDATES = 4 * EPOCH, 2, 25


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    kills = random_kills(4, KILLS, BATCHES)
    return compare(tmp_path_factory.mktemp("long"), BATCHES, kills, UPDATES)


def test_a_training_that_is_killed_at_random_is_bit_identical_to_one_that_is_not(trained):
    unbroken, killed = trained
    assert differences(unbroken, killed) == []
    windows = -(-EPOCH // STEPS) * BATCHES // EPOCH
    assert [record["update"] for record in unbroken.records] == list(range(1, windows + 1))
    assert {record["update"] for record in killed.records} == set(range(1, windows + 1))
    assert len(killed.records) > windows  # what was trained after a checkpoint is trained again


def test_the_memory_of_a_long_training_is_flat(trained):
    unbroken, killed = trained
    slopes = [*unbroken.growth, *killed.growth]
    assert unbroken.growth
    assert max(slopes) < 1024, slopes
