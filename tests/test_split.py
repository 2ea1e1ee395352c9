"""Where a batch is cut."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor

from gaccum_ms.accumulation import micro_batches


@pytest.mark.parametrize("samples", range(1, 40))
@pytest.mark.parametrize("micro_size", [1, 2, 3, 4, 7, 16])
def test_micro_size_bounds_number_and_size(samples, micro_size):
    plan = micro_batches.plan_split([(samples, 3)], micro_size, None)
    sizes = [plan.size] * plan.full + [plan.rest] * (plan.rest > 0)
    assert sum(sizes) == samples
    assert len(sizes) <= micro_size
    assert max(sizes) == -(-samples // micro_size)
    assert plan.rest < plan.size


@pytest.mark.parametrize(
    ("samples", "micro_size", "sizes"),
    [(12, 4, [3, 3, 3, 3]), (10, 4, [3, 3, 3, 1]), (9, 4, [3, 3, 3]), (3, 4, [1, 1, 1])],
)
def test_documented_boundaries(samples, micro_size, sizes):
    plan = micro_batches.plan_split([(samples,)], micro_size, None)
    assert [plan.size] * plan.full + [plan.rest] * (plan.rest > 0) == sizes


@pytest.mark.parametrize(("samples", "full", "rest"), [(8, 2, 0), (9, 2, 1), (3, 1, 0)])
def test_micro_batch_size(samples, full, rest):
    plan = micro_batches.plan_split([(samples, 2)], None, 4)
    assert (plan.full, plan.rest, plan.size) == (full, rest, min(4, samples))


def test_slices_are_the_batch_in_order(pynative):
    x, y = np.arange(30).reshape(10, 3).astype(np.float32), np.arange(10).astype(np.int32)
    pieces = [micro_batches.take((Tensor(x), Tensor(y)), Tensor(i), 4) for i in (0, 4)] + [
        micro_batches.take_rest((Tensor(x), Tensor(y)), 8)
    ]
    for column, whole in enumerate((x, y)):
        np.testing.assert_array_equal(np.concatenate([piece[column].asnumpy() for piece in pieces]), whole)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([], "at least one input, but got none"),
        ([(4, 2), ()], r"input 1 got shape \(\)"),
        ([(4, 2), (3,)], r"same boundaries, but got shapes \[\(4, 2\), \(3,\)\]"),
        ([(0, 2)], "must not be empty"),
    ],
)
def test_refuses_what_cannot_be_split(shapes, message):
    with pytest.raises(ValueError, match=message):
        micro_batches.plan_split(shapes, 2, None)
