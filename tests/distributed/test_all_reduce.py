"""Buffers of gradients: their members, the results on two ranks, and the number of collectives per update."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest

from gaccum_ms.distributed import all_reduce as fused_reduction
from gaccum_ms.distributed.all_reduce import FusedReducer, plan_buffers
from tests.ranks.fused_worker import KINDS, LIMIT, SUM
from tests.support.reference import relative_error
from tests.support.two_ranks import Results, case, results_of


@pytest.mark.parametrize(
    ("sizes", "limit", "buffers"),
    [
        ([], 10, ()),
        ([3], 10, ((0,),)),
        ([3, 3, 5], 10, ((0, 1), (2,))),
        ([2, 99, 3, 10, 4], 10, ((1,), (3,), (0, 2, 4))),
        ([9, 9, 1, 9], 10, ((0,), (1, 2), (3,))),
        ([1, 1], 0, ((0,), (1,))),
    ],
)
def test_plan(sizes, limit, buffers):
    assert plan_buffers(sizes, limit) == buffers


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_of_a_reducer(monkeypatch, kind):
    """Gradients are sent as float32, so a float16 counts four bytes. A rank's own gradients are in no buffer."""
    monkeypatch.setattr(fused_reduction, "BUFFER_BYTES", LIMIT)
    monkeypatch.setattr(fused_reduction.ops, "AllReduce", lambda group: None)  # one process has no collectives
    reducer = FusedReducer(KINDS[kind].weights(), True, 2)
    assert tuple(sorted((*((one,) for one in reducer.alone), *reducer.shared))) == tuple(sorted(KINDS[kind].buffers))
    assert reducer.own == tuple(KINDS[kind].own)


@pytest.mark.parametrize(
    ("fusion", "limit"),
    [
        ({"allreduce": {"mode": "size", "config": 3}}, 3 * 2**20),
        ({"allreduce": {"mode": "auto", "config": None}}, fused_reduction.BUFFER_BYTES),
        ({"openstate": False}, 0),
    ],
)
def test_comm_fusion_of_mindspore_sets_the_limit(fusion, limit):
    try:
        ms.set_auto_parallel_context(comm_fusion=fusion)
        assert fused_reduction.buffer_bytes() == limit
    finally:
        ms.set_auto_parallel_context(comm_fusion={"openstate": True, "allreduce": {"mode": "auto", "config": None}})
    assert fused_reduction.buffer_bytes() == fused_reduction.BUFFER_BYTES


ranks = results_of("fused_worker")


def both(results: Results, name: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The results of our reducer and of MindSpore's reducer."""
    ours, theirs = case(results, name), case(results, f"{name}, MindSpore's")
    return [ours[key] for key in sorted(ours)], [theirs[key] for key in sorted(theirs)]


@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
def test_bit_by_bit_what_mindspores_reducer_returns(ranks, kind):
    """Two ranks add up in only one order."""
    own = KINDS[kind].own
    for rank, results in enumerate(ranks):
        ours, theirs = both(results, kind)
        gradients = [gradient.astype(ms.float64).asnumpy() for gradient in KINDS[kind].of_rank(rank)]
        for number, (mine, other, gradient) in enumerate(zip(ours, theirs, gradients, strict=True)):
            np.testing.assert_array_equal(mine, other)
            assert np.array_equal(mine, gradient) == (number in own)
    pairs = zip(both(ranks[0], kind)[0], both(ranks[1], kind)[0], strict=True)
    for number, (one, other) in enumerate(pairs):
        assert np.array_equal(one, other) == (number not in own)


@pytest.mark.distributed
def test_the_mean_is_the_sum_over_the_number_of_ranks(ranks):
    for results in ranks:
        (mean, _), (ours, theirs) = both(results, "dtypes"), both(results, SUM)
        for one, other, half in zip(ours, theirs, mean, strict=True):
            np.testing.assert_array_equal(one, other)
            assert relative_error(half, one / 2) < 0.01  # one of them is bfloat16
            assert relative_error(half, one) > 0.3


@pytest.mark.distributed
def test_what_is_not_finite_spreads_to_its_own_gradient_on_all_ranks_and_to_no_other(ranks):
    """One buffer holds four gradients. On rank 1 the second has a NaN and the third an infinity."""
    means = both(ranks[0], "all small")[0]
    for results in ranks:
        got = case(results, "poisoned, all small")
        assert np.isnan(got["1"])
        assert got["2"][1] == np.inf
        assert np.isfinite(np.delete(got["2"], 1)).all()
        for number in ("0", "3"):
            np.testing.assert_array_equal(got[number], means[int(number)])


@pytest.mark.distributed
def test_a_compiled_update_runs_one_collective_for_each_buffer(ranks):
    """Of four micro-batches. A large gradient and a small one are two buffers."""
    for results in ranks:
        assert results["collectives"] == 2
