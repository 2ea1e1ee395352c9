"""Buffers of gradients: their members, the results on two ranks, and the number of collectives per update."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest

from gaccum_ms.distributed import all_reduce as fused_reduction
from gaccum_ms.distributed.all_reduce import FusedReducer, plan_buffers
from tests.ranks.fused_worker import BYTES, COLLECTIVES, KINDS, LIMIT, MODES, SUM
from tests.support.ranks import Ranks
from tests.support.reference import relative_error
from tests.support.two_ranks import Results, case, results_of

# -- the plan ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "limit", "buffers"),
    [
        ([], 10, ()),
        ([3], 10, ((0,),)),
        ([3, 3, 3], 10, ((0, 1, 2),)),
        ([3, 3, 4], 10, ((0, 1, 2),)),
        ([3, 3, 5], 10, ((0, 1), (2,))),
        ([10], 10, ((0,),)),
        ([99, 10], 10, ((0,), (1,))),
        ([2, 99, 3, 10, 4], 10, ((1,), (3,), (0, 2, 4))),
        ([9, 9, 1, 9], 10, ((0,), (1, 2), (3,))),
        ([1, 1], 0, ((0,), (1,))),
        ([0, 0, 5], 10, ((0, 1, 2),)),
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


@pytest.mark.parametrize(("device", "buffers"), [("CPU", 147), ("GPU", 50), ("Ascend", 50)])
def test_gpt_2_medium_leaves_in_buffers_of_25_mib_but_on_cpu(monkeypatch, device, buffers):
    monkeypatch.setattr(fused_reduction.ms, "get_context", {"device_target": device}.get)
    width = 1024
    norm, square = [width, width], [width * width, width]
    wide, narrow = [4 * width * width, 4 * width], [4 * width * width, width]
    weights = [50257 * width, 1024 * width, *(norm + square * 4 + norm + wide + narrow) * 24, *norm]
    assert len(plan_buffers([4 * size for size in weights], fused_reduction.buffer_bytes())) == buffers


# -- two ranks ---------------------------------------------------------------------------------------------------------


ranks = results_of("fused_worker")


@pytest.fixture(scope="module")
def ranks_with_graphs(tmp_path_factory):
    """The same of ranks that save their graphs."""
    out = tmp_path_factory.mktemp("counted")
    saving = {"MS_DEV_SAVE_GRAPHS": "2", "MS_DEV_DUMP_IR_PASSES": "validate"}
    with Ranks(out, environment={**saving, "MS_DEV_SAVE_GRAPHS_PATH": str(out / "graphs")}) as two:
        yield two.worker("tests.ranks.fused_worker", out)


def both(results: Results, name: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The results of our reducer and of MindSpore's reducer."""
    ours, theirs = case(results, f"{name}/ours"), case(results, f"{name}/MindSpore's")
    return [ours[key] for key in sorted(ours)], [theirs[key] for key in sorted(theirs)]


@pytest.mark.core(mode="pynative")
@pytest.mark.distributed
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_bit_by_bit_what_mindspores_reducer_returns(ranks, kind, mode):
    """Two ranks add up in only one order."""
    for rank, results in enumerate(ranks):
        ours, theirs = both(results, f"{kind}, {mode}")
        gradients = [gradient.astype(ms.float64).asnumpy() for gradient in KINDS[kind].of_rank(rank)]
        assert len(ours) == len(theirs) == len(gradients)
        for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            np.testing.assert_array_equal(mine, other)
            assert np.array_equal(mine, gradients[number]) == (number in KINDS[kind].own)
    pairs = zip(both(ranks[0], f"{kind}, {mode}")[0], both(ranks[1], f"{kind}, {mode}")[0], strict=True)
    for number, (one, other) in enumerate(pairs):
        assert np.array_equal(one, other) == (number not in KINDS[kind].own)


@pytest.mark.core(mode="pynative")
@pytest.mark.distributed
@pytest.mark.parametrize("mode", MODES)
def test_the_mean_is_the_sum_over_the_number_of_ranks(ranks, mode):
    for results in ranks:
        (mean, _), (ours, theirs) = both(results, f"dtypes, {mode}"), both(results, f"{SUM}, {mode}")
        for one, other, half in zip(ours, theirs, mean, strict=True):
            np.testing.assert_array_equal(one, other)
            assert relative_error(half, one / 2) < 0.01  # one of them is bfloat16
            assert relative_error(half, one) > 0.3


@pytest.mark.core(mode="pynative")
@pytest.mark.distributed
@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_finite_spreads_to_its_own_gradient_on_all_ranks_and_to_no_other(ranks, mode):
    """One buffer holds four gradients. On rank 1 the second has a NaN and the third an infinity."""
    means = both(ranks[0], f"all small, {mode}")[0]
    for results in ranks:
        got = case(results, f"poisoned, all small, {mode}/ours")
        assert np.isnan(got["1"])
        assert got["2"][1] == np.inf
        assert np.isfinite(np.delete(got["2"], 1)).all()
        for number in ("0", "3"):
            np.testing.assert_array_equal(got[number], means[int(number)])


@pytest.mark.thorough  # test_counted_ranks.py and test_window_ranks.py count quickly, in PyNative mode
@pytest.mark.distributed
@pytest.mark.parametrize(("micro_size", "steps"), [(4, 1), (16, 4)])
def test_collectives_and_bytes_per_update_are_those_of_the_buffers(ranks_with_graphs, micro_size, steps):
    """All settings have the same collectives that ran, collectives in the graph, and bytes. Windows of several batches
    also send three sums, 12 bytes."""
    for results in ranks_with_graphs:
        got = results[f"collectives {micro_size} {steps}"].tolist()
        assert got == [COLLECTIVES, COLLECTIVES, BYTES + 12 * (steps > 1)]


@pytest.mark.thorough
@pytest.mark.distributed
def test_the_counts_tell_a_step_that_sends_more(ranks_with_graphs):
    """MindSpore's reducer runs one collective for each weight."""
    for results in ranks_with_graphs:
        assert results["collectives control: MindSpore's reducer"].tolist() == [4, 4, BYTES]
