"""Means, counts, ratios, several losses, outputs, transforms and windows of several batches equal the whole batch's in
float64, also in pipelines. Graphs have the collectives and the order of micro-batches that docs/parallel.md shows."""

from __future__ import annotations

import numpy as np
import pytest

from tests.semi_auto.cases import OPTIONS
from tests.semi_auto.finished_graph import COLLECTIVES
from tests.semi_auto.ran import RANKS, WEIGHTS, Ran, batch
from tests.semi_auto.whole_batch import Update

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("parallel")]


def expected(option, values, data):
    """The whole batch's update."""
    options = OPTIONS[option]
    masked = options.get("returns") not in ("plain", "none")
    clip, least = options.get("max_grad_norm"), options.get("min_count", 0.0)
    return Update(values, data, options.get("loss_weights", (1.0,)), clip, least, masked)


def run(cases, option, layout, stages=1, data=None):
    """The graphs after one run, and the whole batch's update."""
    pipeline = f", {stages} stages" if stages > 1 else ""
    ran = Ran(cases(f"{option}, {layout}{pipeline}", stages), layout, data, stages)
    return ran, expected(option, ran.values, ran.data)


@pytest.mark.parametrize(
    ("option", "layout", "stages"),
    [
        ("ratio, clip", "op", 1),
        ("ratio, scale", "split", 1),
        ("ratio, clamped", "ws", 1),
        ("ratio", "unlazy sg", 1),
        ("ratio, aux", "dp", 1),
        ("sum, count", "sg", 1),
        ("mean, count, aux", "auto", 1),
        ("two sums, list, clamped", "dp", 1),
        ("two means, scale", "split", 1),
        ("two ratios", "lazy dp", 1),
        ("two ratios, clip", "auto", 1),
        ("ratio, scale", "split", 2),
        ("plain, clip", "sg", 2),
        ("per sample", "split", 2),
        ("sum, count", "op", 2),
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


def test_two_updates_clear_between_them(cases):
    ran, first = run(cases, "sum, count", "op", 2)
    ran.step(ran.data)
    assert ran.distance(expected("sum, count", {**ran.values, **first.after}, ran.data)) < 1e-5
    assert not any(np.any(part) for name in first.after for part in ran.parameter(f"accu_grads.{name}"))


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


@pytest.mark.parametrize(("layout", "stages"), [("dp", 1), ("auto", 4)])
def test_outputs_are_each_ranks_own_samples_in_order(cases, layout, stages):
    """And numbers are divided as the loss is, which in a pipeline all stages know."""
    ran, whole = run(cases, "ratio, aux", layout, stages)
    means = [np.sum(whole.out**2) / whole.totals[0]] * RANKS
    np.testing.assert_allclose([result[1] for result in ran.results], means, rtol=1e-5)
    if stages == 1:
        outputs = np.split(whole.out, RANKS)
        np.testing.assert_allclose([result[2] for result in ran.results], outputs, rtol=1e-4, atol=1e-5)
        assert ran.counts["AllGather"] == 0


def test_denominators_of_the_whole_batch_cost_no_forward(cases):
    """Several ratios call the network on the whole batch; the compiler leaves the denominators of that call alone."""
    pairs = ("two sums, list, clamped", "dp"), ("two ratios, clip", "auto")
    sums, ratios = (run(cases, *pair)[0].counts["MatMul"] for pair in pairs)
    assert ratios == sums


def test_shared_inputs_are_whole_in_each_micro_batch(cases):
    x, y = batch()
    ran = Ran(cases("shared"), data=(x, y, np.full((1, 1), 3.0, np.float32)))
    assert ran.distance(Update(ran.values, (x, 3 * y))) < 1e-5


@pytest.mark.parametrize(
    ("option", "layout", "stages", "momentum", "limit"),
    [("transforms", "split", 1, 0.9 * 0.5, 0.46), ("spikes, average", "op", 2, 0.0, 0.01)],
)
def test_a_chain_of_transforms(cases, option, layout, stages, momentum, limit):
    """`SkipSpikes` and a clip have the norm of the whole. A transform's numbers for each element, and the averages, lie
    as their weights do."""
    ran, whole = run(cases, option, layout, stages)
    np.testing.assert_allclose(ran.parameter("gaccum_ms.judged_norm"), [whole.norm] * RANKS, rtol=1e-4)
    moments = {name: momentum + 0.1 / whole.norm * one for name, one in whole.gradients.items()}
    above = np.concatenate([one.ravel() > limit for one in moments.values()])
    assert above.any()
    assert not above.all()
    whole.gradients = moments
    assert ran.distance(whole.move(lambda gradient: np.clip(gradient, -limit, limit))) < 1e-4
    averages = {name: 0.75 * whole.before[name] + 0.25 * after for name, after in whole.after.items()}
    for prefix, whole.after in ("average", averages), *([("moment", moments)] if momentum else []):
        assert ran.distance(whole, f"gaccum_ms.{prefix}.") < 1e-3  # an average moves little beside float32's rounding


def test_a_spike_updates_on_no_rank(cases):
    ran, whole = run(cases, "spikes", "sg")
    (x, y), clipped = ran.data, whole.move(lambda gradient: 0.1 / whole.norm * gradient)
    assert ran.distance(clipped) < 1e-4
    ran, whole = run(cases, "spikes", "sg", data=(x, 1000 * y))
    assert whole.norm > 100.0
    assert not any(ran.moved(WEIGHTS))
    assert [int(number) for number in ran.parameter("gaccum_ms.skipped_updates")] == [1] * RANKS


def joined(*batches):
    return tuple(np.concatenate(parts) for parts in zip(*batches, strict=True))


def run_windows(cases, option, layout, batches, windows):
    """The graphs after these batches, and the updates by whole windows."""
    case = cases(f"{option}, {layout}")
    ran, values = Ran.windows(case, layout, batches, 1024.0 if "scale" in option else 1.0), case.parameters
    for window in windows:
        whole = expected(option, values, window)
        values = {**values, **whole.after}
    return ran, whole


def assert_ended(ran, whole, batches, tolerance=1e-4):
    """The update is the whole window's, whose loss and batches are known."""
    assert ran.distance(whole) < tolerance
    np.testing.assert_allclose(ran.parameter("gaccum_ms.window_loss"), [whole.loss] * RANKS, rtol=1e-5)
    assert [float(one) for one in ran.parameter("gaccum_ms.window_batches")] == [batches] * RANKS


@pytest.mark.parametrize(
    ("option", "layout"),
    [("windows, clip, aux", "split"), ("windows, scale", "ws"), ("windows, sum, count, clamped", "sg")],
)
def test_two_windows_of_two_batches_equal_two_updates(cases, option, layout):
    batches = [batch(seed) for seed in range(1, 5)]
    ran, whole = run_windows(cases, option, layout, batches, [joined(*batches[:2]), joined(*batches[2:])])
    assert_ended(ran, whole, 2)
    assert [float(one) for one in ran.parameter("gaccum_ms.window_count")] == [whole.totals[0]] * RANKS
    assert not any(np.any(ran.parameter("accu_grads." + name)) for name in WEIGHTS)


@pytest.mark.parametrize(("kind", "layout"), [("mean", "dp"), ("sum", "op")])
def test_a_window_of_three_batches_that_count_nothing(cases, kind, layout):
    """A mean is over the samples of all batches. Nothing divides a sum."""
    batches = [batch(seed) for seed in (1, 2, 3)]
    ran = Ran.windows(cases(f"windows, {kind}, {layout}"), layout, batches, steps=3)
    whole = Update(ran.values, joined(*batches), masked=False)
    factor = 1.0 if kind == "mean" else whole.totals[0]
    whole.move(lambda gradient: factor * gradient).loss *= factor
    assert_ended(ran, whole, 3, 1e-5)


def test_a_flush_divides_by_the_batches_that_there_are(cases):
    """The batch that does not end its window reduces no gradient."""
    data = batch(1)
    ran, whole = run_windows(cases, "windows, clip, aux", "split", [data, "flush"], [data])
    assert_ended(ran, whole, 1)
    assert not ran.adding.gradient_collectives()
    assert ran.gradient_collectives()


@pytest.mark.parametrize(
    ("name", "reduced", "gathered"),
    [("plain", 4, 0), ("ours, 4", 8, 0), ("per sample, 4", 4, 0), ("framework, 4", 8, 2)],
)
def test_an_update_has_as_many_collectives_as_docs_parallel_shows(cases, name, reduced, gathered):
    """If the network takes the mean itself, the sum over devices is part of the mean's operator, in MindSpore's own
    cell too. No pass of the compiler moves it behind the Add that follows."""
    ran = Ran(cases(name))
    counts = {kind: ran.counts[kind] for kind in COLLECTIVES if ran.counts[kind]}
    assert counts == {"AllReduce": reduced} | ({"AllGather": gathered} if gathered else {})
    assert len(ran.gradient_collectives()) == len(WEIGHTS)


@pytest.mark.parametrize(("name", "accumulators"), [("ratio, clip, op", 1), ("sum, count, sg", RANKS)])
def test_optimizer_parallel_scatters_gradients_and_keeps_a_part_of_the_weights(cases, name, accumulators):
    """And with `gradient_accumulation_shard` a part of the accumulators."""
    ran = Ran(cases(name))
    assert ran.counts["ReduceScatter"] > 0
    for state, parts in ("", RANKS), ("accum.", RANKS), ("accu_grads.", accumulators):
        name = f"{state}{WEIGHTS[-1]}"
        assert ran.parameter(name)[0].size == ran.values[name].size // parts


def test_lazy_inline_compiles_the_network_once(cases):
    case = cases("sum, count, sg")
    compiled = sum(node.op == "MatMul" for graph in case.program.graphs.values() for node in graph.nodes)
    assert Ran(case).counts["MatMul"] == 4 * compiled


def test_a_micro_batchs_forward_waits_for_the_backward_before_it(cases):
    """So that the activations of one micro-batch live at a time."""
    nodes, before = cases("ours, 4").program.entry.nodes, {}
    for node in nodes:  # all nodes that must have run before
        direct = {one for one in node.arguments if one in before}
        before[node.name] = direct.union(*(before[one] for one in direct))
    begins = {(node.attribute("micro"), node.name) for node in nodes if node.op == "StridedSlice"}
    ends = {(node.attribute("grad_accu_backward_end"), node.name) for node in nodes if "grad" in node.scope.lower()}
    assert {micro for micro, _ in begins} == set(range(4))
    for micro, begin in begins:
        of_last = {end for earlier, end in ends if earlier == micro - 1}
        assert micro == 0 or before[begin] & of_last, f"micro-batch {micro} does not wait"
