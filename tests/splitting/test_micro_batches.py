"""The boundaries of micro-batches."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from gaccum_ms.checks.batches import batch_shapes
from gaccum_ms.splitting import micro_batches


def sizes_of(plan):
    return [plan.size] * plan.full + [plan.rest] * (plan.rest > 0)


def test_documented_boundaries():
    """Where two samples are the least, the user's own choice of one is obeyed."""
    for samples, micro_size, micro_batch_size, least, sizes in (
        (10, 4, None, 1, [3, 3, 3, 1]),
        (9, 4, None, 1, [3, 3, 3]),
        (3, 4, None, 1, [1, 1, 1]),
        (9, None, 4, 1, [4, 4, 1]),
        (3, None, 4, 1, [3]),
        (9, None, 4, 2, [4, 5]),
        (5, None, 4, 2, [5]),
        (6, None, 4, 2, [4, 2]),
        (1, None, 4, 2, [1]),
        (3, None, 1, 2, [1, 1, 1]),
    ):
        assert sizes_of(micro_batches.plan_split([(samples,)], micro_size, micro_batch_size, least=least)) == sizes


@pytest.mark.parametrize("micro_size", [1, 4, 7])
def test_no_single_sample_is_left_to_what_needs_two(micro_size):
    """With `least` , at most half as many micro-batches as samples, and one sample more than without it."""
    for samples in range(2, 70):
        plan = micro_batches.plan_split([(samples, 3)], micro_size, None, least=2)
        sizes = sizes_of(plan)
        assert sum(sizes) == samples
        assert len(sizes) <= min(micro_size, samples // 2)
        assert min(sizes) >= 2
        full = -(-max(samples, 2 * micro_size) // micro_size)  # in a batch that is full
        assert max(sizes) <= full + 1
        without = micro_batches.plan_split([(samples, 3)], micro_size, None)
        if 1 not in sizes_of(without):
            assert plan == without
    assert sizes_of(micro_batches.plan_split([(1,)], micro_size, None, least=2)) == [1]


@pytest.mark.parametrize("least", [1, 2])
def test_a_graph_of_open_shapes_cuts_as_python_does(least, pynative):
    for sizes in ((4, None), (8, None), (None, 3), (None, 4), (None, 1)):
        for samples in (1, 2, 4, 5, 9, 16, 17):
            plan = micro_batches.plan_split([(samples,)], *sizes, least=least)
            size = ms.Tensor(plan.size, ms.int32)
            known = least if sizes[1] != 1 else 1
            opened = (ms.Tensor(samples, ms.int32), size, ms.Tensor(samples, ms.int32), 0, False, (), known)
            rows, start = [], 0
            while start < samples:
                rows.append(int(micro_batches.rows_from(ms.Tensor(start, ms.int32), opened)))
                start += rows[-1]
            assert rows == sizes_of(plan)
            assert int(micro_batches.rows_at_the_end(opened)) == rows[-1]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([], "at least one input, but got none"),
        ([(4, 2), ()], r"input 1 got shape \(\)\. What all samples share is .* by split=EvenSplit\(shared=\(1,\)\)"),
        ([(), (4, 2)], r"input 0 got shape \(\)\. The first input must have samples"),
        ([(4, 2), (3,)], r"same boundaries, but got shapes \[\(4, 2\), \(3,\)\].*split=EvenSplit\(shared=\(1,\)\)"),
        ([(4, 2), (3,), (4,), (5, 1)], r"split=EvenSplit\(shared=\(1, 3\)\)"),
        ([(0, 2)], "must not be empty"),
    ],
)
def test_refuses_what_cannot_be_split(shapes, message):
    with pytest.raises(ValueError, match=message):
        micro_batches.plan_split(shapes, 2, None)


# -- inputs that are no Tensors of numbers -----------------------------------------------------------------------------


LARGE = Tensor(np.ones((8, 300)))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"x": LARGE, "n": 2},
            r"a dict of 2 \('x': Tensor of shape \(8, 300\) and dtype Float64, 'n': 2 of type 'int'",
        ),
        ((LARGE,) * 9, r"a tuple of 9 \(0: Tensor of shape \(8, 300\) and dtype Float64, .*, \.\.\.\)"),
        (None, "None of type 'NoneType'"),
        ("a" * 5000, r"of numbers, .*'aaaa.*\.\.\. of type 'str'"),
        (np.array(["ab"] * 8), r"of numbers, .* got ndarray of shape \(8,\) and dtype <U2"),  # a data set's column
    ],
    ids=["dict", "tuple", "None", "str", "strings"],
)
def test_inputs_are_refused_without_printing_what_is_in_them(value, message):
    with pytest.raises(TypeError, match=f"For 'GradAccumulationCell', every input .*{message}") as error:
        batch_shapes((Tensor(np.ones((8, 3))), value))
    assert len(str(error.value)) < 700
    assert "of numbers" in str(error.value) or "split=EvenSplit(shared=(1,)) gives it whole" in str(error.value)
    assert "attribute" not in str(error.value)
