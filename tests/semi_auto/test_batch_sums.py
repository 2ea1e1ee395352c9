"""Means, counts, ratios, several losses and outputs, in each layout of weights, equal the whole batch's in float64."""

from __future__ import annotations

import numpy as np
import pytest

from tests.semi_auto import whole_batch
from tests.semi_auto.cases import OPTIONS
from tests.semi_auto.compiled import SECOND_COMPILER, THOROUGH
from tests.semi_auto.ran import RANKS, WEIGHTS, Ran

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("parallel")]

# Every option in the layout that takes the least, gradient_accumulation_shard, and in others pairwise.
QUICK = [
    ("ratio, clip", "op"),
    ("ratio, scale", "split"),
    ("sum, count", "sg"),
    ("two sums", "dp"),
    ("ratio, aux", "dp"),
]
PAIRS = [
    *(("ratio", layout) for layout in ("dp", "split", "op", "ws", "sg", "unlazy sg", "lazy dp")),
    *(("ratio, clip", layout) for layout in ("split", "ws", "sg")),
    *(("ratio, scale", layout) for layout in ("dp", "op", "sg", "lazy split")),
    *(("ratio, scale alone", layout) for layout in ("dp", "sg")),
    *(("ratio, clamped", layout) for layout in ("dp", "ws", "sg")),
    *(("sum, count", layout) for layout in ("split", "op")),
    *(("sum, count, clip", layout) for layout in ("op", "sg")),
    *(("mean, count", layout) for layout in ("split", "ws", "sg")),
    *(("two sums", layout) for layout in ("split", "op", "sg")),
    ("two sums, list", "dp"),
    *(("two sums, scale, clamped", layout) for layout in ("dp", "sg")),
    *(("two sums, clip", layout) for layout in ("ws", "sg")),
    *(("two means", layout) for layout in ("split", "sg")),
    *(("two ratios", layout) for layout in ("lazy dp", "op", "ws", "sg")),
    *(("two ratios, clip", layout) for layout in ("split", "sg")),
    *(("ratio, aux", layout) for layout in ("split", "sg")),
    ("ratio, aux, scale", "op"),
    *(("mean, count, aux", layout) for layout in ("ws", "sg")),
    *((option, "auto") for option in ("ratio, aux", "mean, count, aux", "two sums", "two ratios, clip")),
]
ALL = [*QUICK, *(pytest.param(*pair, marks=THOROUGH) for pair in PAIRS)]


def run(cases, option, layout, batch=None):
    """The graph after one run, and the whole batch's update."""
    case, options, (parts, places) = cases(f"{option}, {layout}"), OPTIONS[option], whole_batch.place(layout)
    batch = whole_batch.batch() if batch is None else batch
    weights = options.get("loss_weights", (1.0,))
    clip, least = options.get("max_grad_norm"), options.get("min_count", 0.0)
    return Ran(case, parts, batch, places), whole_batch.Update(case.parameters, batch, weights, clip, least)


@pytest.mark.parametrize(("option", "layout"), ALL)
def test_equals_the_whole_batch(cases, option, layout):
    ran, whole = run(cases, option, layout)
    clips = "max_grad_norm" in OPTIONS[option]
    assert whole_batch.distance(ran, whole, layout) < (1e-4 if clips else 1e-5)
    losses = [float(result[0] if isinstance(result, tuple) else result) for result in ran.results]
    np.testing.assert_allclose(losses, [whole.loss] * RANKS, rtol=1e-5)
    totals = np.array([one.ravel() for one in ran.parameter("gaccum_ms.window_count")])
    assert (totals == whole.totals[: totals.shape[1]]).all()
    if clips:
        assert whole.norm > 0.1
        np.testing.assert_allclose(ran.parameter("gaccum_ms.grad_norm"), [whole.norm] * RANKS, rtol=1e-4)
    if "gaccum_ms.loss_terms" in ran.machine.state:
        np.testing.assert_allclose(ran.parameter("gaccum_ms.loss_terms"), [whole.terms] * RANKS, rtol=1e-5)
    _, other = run(cases, option, layout, whole_batch.batch(8))
    assert whole_batch.distance(ran, other, layout) > 1e-2  # another batch's update is detected


@pytest.mark.thorough
@SECOND_COMPILER
def test_a_quotient_loses_the_norm_of_the_whole(cases):
    """Negative control: the update divides by the total, where it should multiply by its reciprocal."""
    batch = whole_batch.batch()
    case = cases("quotient")
    whole = whole_batch.Update(case.parameters, batch, clip=0.1)
    assert whole_batch.distance(Ran(case, batch=batch), whole, "op") > 0.1


@pytest.mark.parametrize(
    "layout", ["split", *(pytest.param(layout, marks=THOROUGH) for layout in ("dp", "op", "lazy split"))]
)
def test_an_overflow_on_one_rank_is_one_on_all(cases, layout):
    """The machine fails if ranks take different branches. Here they take the same branch, and none updates."""
    (x, y), (parts, places), case = whole_batch.batch(), whole_batch.place(layout), cases(f"ratio, scale, {layout}")
    fine = Ran(case, parts, (x.copy(), y), places)
    x[3] = np.inf  # a sample of one rank, or of two that share it
    ran = Ran(case, parts, (x, y), places)
    for one, overflows in ((fine, False), (ran, True)):
        assert all(bool(result[1]) == overflows for result in one.results)
        for name in WEIGHTS:
            stays = [np.array_equal(*two) for two in zip(one.parameter(name), one.before[name], strict=True)]
            assert all(stays) if overflows else not any(stays)
    assert [float(one.reshape(())) for one in ran.parameter("gaccum_ms.scale_sense")] == [512.0] * RANKS


@pytest.mark.parametrize(
    ("option", "layout"),
    [("sum, count", "sg"), pytest.param("two sums", "sg", marks=THOROUGH)],
)
def test_a_batch_that_counts_nothing_does_not_update_sharded_gradients(cases, option, layout):
    x, y = whole_batch.batch()
    ran, _ = run(cases, option, layout, (x, -np.minimum(np.abs(y), 0.1)))
    for name in WEIGHTS:
        assert all(np.array_equal(*two) for two in zip(ran.parameter(name), ran.before[name], strict=True))
        assert not np.any(ran.parameter("accu_grads." + name))


@pytest.mark.thorough
@SECOND_COMPILER
@pytest.mark.parametrize(("name", "bad"), [("over labels", (-0.01, np.inf)), ("two, over labels", (np.inf,))])
def test_a_micro_batchs_bad_denominator_updates_nothing_though_the_total_is_positive(cases, name, bad):
    """The total becomes NaN, of which the step makes an error. Those of several losses are the whole batch's own."""
    x, y = whole_batch.batch()
    for label, is_bad in ((0.01, False), *((label, True) for label in bad)):
        labels = np.abs(y).reshape(RANKS, 4, -1)
        labels[:, 1] = label  # each device's second micro-batch
        ran = Ran(cases(name), batch=(x, labels.reshape(y.shape)))
        totals = np.array([total.ravel()[0] for total in ran.parameter("gaccum_ms.window_count")])
        assert (np.isnan(totals) if is_bad else totals > 0).all()
        assert is_bad == all(np.array_equal(ran.parameter(one)[0], ran.before[one][0]) for one in WEIGHTS)


@pytest.mark.parametrize("option", ["ratio, aux", pytest.param("mean, count, aux", marks=THOROUGH)])
def test_outputs_are_each_ranks_own_samples_in_order(cases, option):
    layout = "ws" if "mean" in option else "dp"
    x, _ = batch = whole_batch.batch()
    ran, whole = run(cases, option, layout, batch)
    values = cases(f"{option}, {layout}").parameters
    output = np.maximum(x @ values["first"] + values["bias"], 0) @ values["second"]
    for (_, mean, own), expected in zip(ran.results, np.split(output, RANKS), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-5)
        if "ratio" in option:  # a numerator, divided as the loss is
            np.testing.assert_allclose(mean, np.sum(output**2) / whole.totals[0], rtol=1e-5)
    if layout == "dp":
        assert ran.counts["AllGather"] == 0


@pytest.mark.thorough
@SECOND_COMPILER
@pytest.mark.parametrize(("layout", "forwards"), [("op", 0), ("sg", 1)])
def test_denominators_of_the_whole_batch_cost_no_forward(cases, layout, forwards):
    """Several ratios call the network on the whole batch; the compiler leaves the denominators of that call alone, but
    not in a network that the user has decorated with lazy_inline."""
    ratios, sums = (run(cases, option, layout)[0].counts["MatMul"] for option in ("two ratios", "two sums"))
    assert ratios == sums + 2 * forwards


@pytest.mark.thorough
@SECOND_COMPILER
def test_a_count_leaves_losses_per_sample_one_collective(cases, plain):
    """The count itself is one more."""
    assert Ran(cases("per sample, count")).counts["AllReduce"] == plain.counts["AllReduce"] + 1


@pytest.mark.thorough
@SECOND_COMPILER
@pytest.mark.parametrize(("name", "layout"), [("shared", "dp"), ("shared, split", "split")])
def test_shared_inputs_are_whole_in_each_micro_batch(cases, name, layout):
    (x, y), scale, (parts, places) = whole_batch.batch(), np.full((1, 1), 3.0, np.float32), whole_batch.place(layout)
    case = cases(name)
    ran = Ran(case, parts, (x, y, scale), places)
    assert whole_batch.distance(ran, whole_batch.Update(case.parameters, (x, 3 * y)), layout) < 1e-5
    assert whole_batch.distance(ran, whole_batch.Update(case.parameters, (x, y)), layout) > 1e-2
