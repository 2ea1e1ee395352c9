"""BalancedSampler: each rank's samples, in successive epochs and in a data set; ranks have nearly equal tokens."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from mindspore.dataset import GeneratorDataset

from gaccum_ms import BalancedSampler
from gaccum_ms.splitting.balanced_sampler import dealt

RANKS, BATCH = 8, 16


def corpus(samples=1500):
    """Lengths between 3 and 300."""
    return np.exp(np.random.default_rng(3).uniform(np.log(3), np.log(300), samples)).astype(int)


def of_ranks(lengths, batch=BATCH, ranks=RANKS, **options):
    return [BalancedSampler(lengths, batch, ranks, rank, **options) for rank in range(ranks)]


def joined(parts):
    return list(itertools.chain.from_iterable(parts))


def test_ranks_have_equally_much_to_do():
    """In each full global batch."""
    lengths = corpus()
    orders = [list(sampler) for sampler in of_ranks(lengths)]
    for start in range(0, min(map(len, orders)) - BATCH + 1, BATCH):
        sums = [lengths[order[start : start + BATCH]].sum() for order in orders]
        assert max(sums) / np.mean(sums) <= 1.05
    costs = np.array([9.0, 7, 6, 5, 2, 1])  # dealt back and forth: 9 + 5 + 2 and 7 + 6 + 1
    assert [costs[part].sum() for part in dealt(costs, 2)] == [15, 15]


def test_nothing_is_dropped_or_doubled_whatever_the_numbers():
    for samples, batch, ranks in [(1, 1, 3), (7, 4, 1), (65, 4, 8), (130, 1, 3)]:
        lengths = corpus(samples)
        for epoch in range(2):
            orders = []
            for one in of_ranks(lengths, batch, ranks):
                one.set_epoch(epoch)
                orders.append(list(one))
                assert len(orders[-1]) == one.num_samples, "MindSpore asks for it before the first epoch"
            assert sorted(joined(orders)) == list(range(samples))
            assert max(map(len, orders)) - min(map(len, orders)) <= 1


def test_epochs_differ_and_come_again():
    (one,) = of_ranks(corpus(40), 4, 1)
    first, second = list(one), list(one)
    assert first != second
    (again,) = of_ranks(corpus(40), 4, 1)
    again.set_epoch(1)
    assert list(again) == second
    assert list(of_ranks(corpus(40), 4, 1, seed=1)[0]) != first
    one.set_epoch(0)
    assert list(one) == first


def test_a_data_set_gives_each_rank_its_batches_epoch_by_epoch():
    lengths = corpus(70)
    seen = []
    for sampler in of_ranks(lengths, 4, 2):
        expected = BalancedSampler(lengths, 4, 2, len(seen))
        data = GeneratorDataset(list(range(70)), ["number"], sampler=sampler).batch(4)
        rows = data.create_dict_iterator(output_numpy=True, num_epochs=2)
        epochs = []
        for _ in range(2):
            epochs.append(joined(row["number"].tolist() for row in rows))
        assert epochs == [list(expected), list(expected)]
        seen.append(epochs)
        sampler.set_epoch(1)  # each new iterator begins with this epoch: a user's own loop sets it
        again = data.create_dict_iterator(output_numpy=True, num_epochs=1)
        assert joined(row["number"].tolist() for row in again) == epochs[1]
    for epoch in range(2):
        assert sorted(seen[0][epoch] + seen[1][epoch]) == list(range(70))


def test_bad_arguments():
    for arguments, error, why in (
        (([], 1, 1, 0), ValueError, "'lengths' must have one number for each sample, but got shape"),
        (([1, -1], 1, 1, 0), ValueError, "'lengths' must be finite and not negative, but got -1"),
        (([1], 0, 1, 0), ValueError, "'batch_size' must be at least 1"),
        (([1], 1, 2, 2), ValueError, "'shard_id' must be from 0 to 1, but got 2"),
        (([1], 1, 2, True), TypeError, "'shard_id' must be an int"),
    ):
        with pytest.raises(error, match=why):
            BalancedSampler(*arguments)
