"""A training that lasts: killed and resumed it is bit-identical, and its memory does not grow. long_training.py runs it
for a day."""

from __future__ import annotations

from tests.end_to_end.long_training import EPOCH, STEPS, differences, random_kills, run

SHORT = 22  # batches of an epoch, whose last window is of two
BATCHES = 2 * SHORT


def test_a_training_that_is_killed_at_random_is_bit_identical_to_one_that_is_not(tmp_path):
    unbroken = run(tmp_path / "unbroken", BATCHES, updates=3, epoch=SHORT)
    killed = run(tmp_path / "killed", BATCHES, updates=3, kills=random_kills(5, 2, BATCHES - 10), epoch=SHORT)
    assert differences(unbroken, killed) == []
    windows = -(-SHORT // STEPS) * BATCHES // SHORT
    assert [record["update"] for record in unbroken.records] == list(range(1, windows + 1))
    assert {record["update"] for record in killed.records} == set(range(1, windows + 1))
    assert len(killed.records) > windows  # what was trained after a checkpoint is trained again


def test_the_memory_of_a_long_training_is_flat(tmp_path):
    assert 0 != run(tmp_path / "unbroken", 4 * EPOCH, updates=25).growth < 1024  # bytes a batch
