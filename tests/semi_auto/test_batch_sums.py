"""Means, counts, ratios, several losses and outputs equal the whole batch's in float64, also in pipelines.

`python -m tests.semi_auto.test_batch_sums` compares each option in each layout.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.semi_auto.cases import LAYOUTS
from tests.semi_auto.cases import OPTIONS as OF_ONE_STAGE
from tests.semi_auto.compiled import Compiler
from tests.semi_auto.pipeline_cases import OPTIONS_OF_STAGES as OPTIONS
from tests.semi_auto.ran import RANKS, WEIGHTS, Ran, batch
from tests.semi_auto.whole_batch import Update

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("parallel")]


def run(cases, option, layout, stages=1, data=None):
    """The graphs after one run, and the whole batch's update."""
    options, pipeline = OPTIONS[option], f", {stages} stages" if stages > 1 else ""
    ran = Ran(cases(f"{option}, {layout}{pipeline}", stages), layout, data, stages)
    weights, clip, least = (
        options.get("loss_weights", (1.0,)),
        options.get("max_grad_norm"),
        options.get("min_count", 0),
    )
    masked = options.get("returns") not in ("plain", "none")
    return ran, Update(ran.values, ran.data, weights, clip, least, masked)


@pytest.mark.parametrize(
    ("option", "layout", "stages"),
    [
        ("ratio, clip", "op", 1),
        ("ratio, scale", "split", 1),
        ("ratio, scale alone", "dp", 1),
        ("ratio, clamped", "ws", 1),
        ("ratio", "unlazy sg", 1),
        ("ratio, aux", "dp", 1),
        ("sum, count", "sg", 1),
        ("mean, count, aux", "auto", 1),
        ("two sums, list", "dp", 1),
        ("two sums, scale, clamped", "sg", 1),
        ("two means", "split", 1),
        ("two ratios", "lazy dp", 1),
        ("two ratios, clip", "auto", 1),
        ("ratio, scale", "split", 2),
        ("plain, clip", "sg", 2),
        ("per sample", "split", 2),
        ("sum, count", "op", 2),
        ("mean, count", "split", 2),
        ("ratio, aux", "auto", 4),
    ],
)
def test_equals_the_whole_batch(cases, option, layout, stages):
    """On every stage."""
    ran, whole = run(cases, option, layout, stages)
    clips = "max_grad_norm" in OPTIONS[option]
    assert ran.distance(whole) < (1e-4 if clips else 1e-5)
    np.testing.assert_allclose(ran.losses, [whole.loss] * RANKS, rtol=1e-5)
    totals = [one.ravel() for one in ran.parameter("gaccum_ms.window_count")]
    assert all(np.array_equal(one, whole.totals[: len(one)]) for one in totals)
    assert len(totals) == (0 if option.startswith("p") else RANKS)
    if clips:
        assert whole.norm > 0.1
        np.testing.assert_allclose(ran.parameter("gaccum_ms.grad_norm"), [whole.norm] * RANKS, rtol=1e-4)
    if terms := ran.parameter("gaccum_ms.loss_terms"):
        np.testing.assert_allclose(terms, [whole.terms] * RANKS, rtol=1e-5)


@pytest.mark.parametrize("stages", [1, 2])
def test_an_overflow_on_one_rank_is_one_on_all(cases, stages):
    """The machine fails if ranks take different branches. Here they take the same branch, and none updates."""
    fine, whole = run(cases, "ratio, scale", "split", stages)
    x, y = fine.data
    x[3] = np.inf  # a sample of two ranks, which share it
    with np.errstate(all="ignore"):  # in the update that NumPy computes
        ran, _ = run(cases, "ratio, scale", "split", stages, (x, y))
    for one, overflows in ((fine, False), (ran, True)):
        assert all(bool(result[1]) == overflows for result in one.results)
        assert set(one.moved(whole.after)) == {not overflows}
    assert [float(one.reshape(())) for one in ran.parameter("gaccum_ms.scale_sense")] == [512.0] * RANKS
    assert not np.any(ran.parameter("gaccum_ms.update_count"))


def test_a_batch_that_counts_nothing_does_not_update_sharded_gradients(cases):
    x, y = batch()
    ran, _ = run(cases, "sum, count", "sg", data=(x, -np.abs(y)))
    assert not any(ran.moved(WEIGHTS))
    assert not any(np.any(ran.parameter("accu_grads." + name)) for name in WEIGHTS)


def test_a_micro_batchs_bad_denominator_updates_nothing_though_the_total_is_positive(cases):
    """The total becomes NaN, of which the step makes an error."""
    x, y = batch()
    for label in (0.01, -0.01, np.inf):
        labels = np.abs(y).reshape(RANKS, 4, -1)
        labels[:, 1] = label  # each device's second micro-batch
        ran = Ran(cases("over labels"), data=(x, labels.reshape(y.shape)))
        totals = np.array(ran.parameter("gaccum_ms.window_count"))
        is_bad = label != 0.01
        assert (np.isnan(totals) if is_bad else totals > 0).all()
        assert set(ran.moved(WEIGHTS)) == {not is_bad}


def test_outputs_are_each_ranks_own_samples_in_order(cases):
    """And numbers are divided as the loss is, which in a pipeline all stages know."""
    ran, whole = run(cases, "ratio, aux", "dp")
    x, _ = ran.data
    output = np.maximum(x @ ran.values["first"] + ran.values["bias"], 0) @ ran.values["second"]
    for (_, mean, own), expected in zip(ran.results, np.split(output, RANKS), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(mean, np.sum(output**2) / whole.totals[0], rtol=1e-5)
    assert ran.counts["AllGather"] == 0
    ran, whole = run(cases, "ratio, aux", "auto", 4)
    squares = Update(ran.values, ran.data, masked=False).loss * len(ran.data[0])
    np.testing.assert_allclose([result[1] for result in ran.results], [squares / whole.totals[0]] * RANKS, rtol=1e-5)


def test_denominators_of_the_whole_batch_cost_no_forward(cases):
    """Several ratios call the network on the whole batch; the compiler leaves the denominators of that call alone."""
    pairs = ("two sums, list", "dp"), ("two ratios, clip", "auto")
    sums, ratios = (run(cases, *pair)[0].counts["MatMul"] for pair in pairs)
    assert ratios == sums


def test_shared_inputs_are_whole_in_each_micro_batch(cases):
    x, y = batch()
    ran = Ran(cases("shared"), data=(x, y, np.full((1, 1), 3.0, np.float32)))
    assert ran.distance(Update(ran.values, (x, 3 * y))) < 1e-5


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, Compiler(Path(folder)) as compiler:
        for option, layout in itertools.product(OF_ONE_STAGE, LAYOUTS):
            if not option.startswith(("windows", "transforms", "spikes")):
                test_equals_the_whole_batch(compiler, option, layout, 1)
                print(f"{option}, {layout}: the same", flush=True)
