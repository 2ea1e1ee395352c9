"""What a data set gives a rank in an epoch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mindspore import dataset
from mindspore.dataset import GeneratorDataset, NumpySlicesDataset

from gaccum_ms.backend.data_sets import counts_quickly, epoch_of, samples_of_first_batch

ROWS = 22
X = np.arange(ROWS, dtype=np.float32)


def slices(**options: Any) -> Any:
    return NumpySlicesDataset((X,), ["x"], **{"shuffle": False, **options})


def one_by_one():
    for value in X:
        yield (value,)


@pytest.mark.parametrize(
    ("data_set", "expected"),
    [
        (lambda: slices().batch(4), (6, 22, 4)),
        (lambda: slices().batch(4, drop_remainder=True), (5, 20, 4)),
        (lambda: slices(num_shards=2, shard_id=1).batch(4), (3, 11, 4)),
        (lambda: slices().batch(4).repeat(2).map(lambda x: x), (12, 44, 4)),
        (lambda: slices().batch(4).take(3), (3, 12, 4)),
        (lambda: slices().padded_batch(4, pad_info={}), (6, 22, 4)),
        (lambda: slices().batch(lambda info: 2 + info.get_batch_num() % 2), (9, 0, 0)),  # 2, 3, 2, 3, ...
        (lambda: GeneratorDataset([(np.ones((5, 2)),)] * 3, ["x"]), (3, 0, 0)),  # the source yields batches
        (lambda: GeneratorDataset(one_by_one, ["x"]).batch(4), (6, 24, 4)),  # not read to count what is left
    ],
    ids=lambda value: None if callable(value) else str(value),
)
def test_the_samples_of_an_epoch_and_of_a_batch(data_set, expected):
    assert epoch_of(data_set(), 1)[:3] == expected


@pytest.mark.parametrize(
    ("data_set", "ranks", "order"),
    [
        (lambda: slices().batch(4), 1, ""),
        (lambda: slices(shuffle=True, num_shards=2, shard_id=0).batch(4).map(lambda x: x).repeat(2), 2, ""),
        (lambda: dataset.zip((slices(), slices().rename(["x"], ["y"]))).batch(4), 1, ""),
        (lambda: slices(shuffle=True).batch(4), 1, "'NumpySlicesDataset' without num_shards shuffles in another order"),
        (lambda: slices().batch(4), 2, "'NumpySlicesDataset' has no num_shards=2"),
        (lambda: slices(num_shards=4, shard_id=0).batch(4), 2, "'NumpySlicesDataset' is not for 2 rank"),
        (lambda: slices(num_shards=2, shard_id=0).shuffle(8).batch(4), 2, "'shuffle' orders the samples of each rank"),
        (lambda: slices(num_shards=2, shard_id=0).filter(lambda x: x > 3).batch(4), 2, "'FilterDataset' may order"),
        (lambda: GeneratorDataset(one_by_one, ["x"]).batch(4), 2, "has no num_shards=2"),
    ],
)
def test_what_depends_on_the_number_of_ranks_in_the_order_of_samples(data_set, ranks, order):
    got = epoch_of(data_set(), ranks, batches=1).order
    assert order in got
    assert bool(order) == bool(got)


def test_rows_and_a_first_batch_are_read_only_where_nothing_else_tells():
    assert counts_quickly(slices().shuffle(4).batch(4))
    assert not counts_quickly(slices().filter(lambda x: x > 3).batch(4))
    assert not counts_quickly(GeneratorDataset(one_by_one, ["x"]).batch(4))
    assert samples_of_first_batch(GeneratorDataset([(np.ones((5, 2)),)] * 3, ["x"])) == 5
    assert samples_of_first_batch(slices().batch(4)) == 0
