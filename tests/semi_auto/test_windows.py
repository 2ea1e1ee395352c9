"""Windows of several batches: one graph adds, another adds and updates. Both share the accumulators."""

from __future__ import annotations

import numpy as np
import pytest

from tests.semi_auto import whole_batch
from tests.semi_auto.cases import OPTIONS
from tests.semi_auto.compiled import SECOND_COMPILER, THOROUGH
from tests.semi_auto.ran import RANKS, WEIGHTS, Ran, by_hand

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("parallel")]

QUICK = ("windows, clip", "split")
PAIRS = [
    ("windows", "sg"),
    *(("windows, clip", layout) for layout in ("dp", "op", "ws", "sg", "lazy dp", "auto")),
    *(("windows, scale", layout) for layout in ("op", "ws", "sg")),
    *(("windows, aux", layout) for layout in ("dp", "sg")),
    ("windows, clamped", "op"),
    *(("windows, sum, count", layout) for layout in ("split", "sg")),
    ("windows, one micro-batch", "dp"),
]


def joined(*batches):
    return tuple(np.concatenate(parts) for parts in zip(*batches, strict=True))


def run(cases, option, layout, batches, windows, **others):
    """The graphs after these batches, and the updates by whole windows."""
    case, (parts, places) = cases(f"{option}, {layout}"), whole_batch.place(layout)
    scale = 1024.0 if "scale" in option else 1.0
    ran = Ran.windows(case, parts, places, batches, scale, **others)
    values = case.parameters
    clip, least = OPTIONS[option].get("max_grad_norm"), OPTIONS[option].get("min_count", 0.0)
    for window in windows:
        whole = whole_batch.Update(values, window, clip=clip, min_count=least)
        values = {**values, **whole.after}
    whole.before = case.parameters
    return ran, whole


@pytest.mark.parametrize(("option", "layout"), [QUICK, *(pytest.param(*pair, marks=THOROUGH) for pair in PAIRS)])
def test_two_windows_of_two_batches_equal_two_updates(cases, option, layout):
    batches = [whole_batch.batch(seed) for seed in range(1, 5)]
    ran, whole = run(cases, option, layout, batches, [joined(*batches[:2]), joined(*batches[2:])])
    assert whole_batch.distance(ran, whole, layout) < (1e-4 if "clip" in option or "scale" in option else 1e-5)
    np.testing.assert_allclose(ran.parameter("gaccum_ms.window_loss"), [whole.loss] * RANKS, rtol=1e-5)
    assert [float(one) for one in ran.parameter("gaccum_ms.window_count")] == [whole.totals[0]] * RANKS
    assert [float(one) for one in ran.parameter("gaccum_ms.window_batches")] == [2.0] * RANKS
    assert not any(np.any(ran.parameter("accu_grads." + name)) for name in WEIGHTS)


@pytest.mark.thorough
@SECOND_COMPILER
@pytest.mark.parametrize(("kind", "layout"), [("mean", "dp"), ("mean", "sg"), ("sum", "op")])
def test_a_window_of_three_batches_that_count_nothing(cases, kind, layout):
    """A mean is over the samples of all batches. Nothing divides a sum."""
    case, (parts, places) = cases(f"windows, {kind}, {layout}"), whole_batch.place(layout)
    batches = [whole_batch.batch(seed) for seed in (1, 2, 3)]
    ran = Ran.windows(case, parts, places, batches, steps=3)
    samples = joined(*batches)
    loss, gradients = by_hand(case.parameters, *(array.astype(np.float64) for array in samples))
    factor = 1.0 if kind == "mean" else samples[1].size
    whole = whole_batch.UpdateBySGD(case.parameters, {name: factor * gradient for name, gradient in gradients.items()})
    assert whole_batch.distance(ran, whole, layout) < 1e-5
    np.testing.assert_allclose(ran.parameter("gaccum_ms.window_loss"), [factor * loss] * RANKS, rtol=1e-5)


@pytest.mark.parametrize("layout", ["split", *(pytest.param(layout, marks=THOROUGH) for layout in ("op", "sg"))])
def test_a_flush_divides_by_the_batches_that_there_are(cases, layout):
    batch = whole_batch.batch(1)
    ran, whole = run(cases, "windows, clip", layout, [batch, "flush"], [batch])
    assert whole_batch.distance(ran, whole, layout) < 1e-4
    np.testing.assert_allclose(ran.parameter("gaccum_ms.window_loss"), [whole.loss] * RANKS, rtol=1e-5)
    assert [float(one) for one in ran.parameter("gaccum_ms.window_batches")] == [1.0] * RANKS


@pytest.mark.parametrize("layout", ["split", pytest.param("op", marks=THOROUGH)])
def test_a_batch_that_does_not_end_its_window_reduces_no_gradient(cases, layout):
    batches = [whole_batch.batch(seed) for seed in (1, 2)]
    ran, _ = run(cases, "windows, clip", layout, batches, [joined(*batches)])
    assert not ran.adding.gradient_collectives()
    assert ran.gradient_collectives()


@pytest.mark.thorough
@SECOND_COMPILER
@pytest.mark.parametrize("layout", ["dp", "split"])
def test_adding_with_mindspores_own_reduction_is_wrong(cases, layout):
    """Negative control: the sum that the first batch has reduced is reduced again by the second."""
    batches = [whole_batch.batch(seed) for seed in (1, 2)]
    adding = cases(f"windows, reduced by each batch, {layout}").adding
    ran, whole = run(cases, "windows, clip", layout, batches, [joined(*batches)], adding=adding)
    assert whole_batch.distance(ran, whole, layout) > 0.1


@pytest.mark.thorough
@SECOND_COMPILER
def test_a_batch_that_does_not_end_its_window_keeps_a_saturating_devices_flag(cases):
    """The adding graph clears the device's flag, and adds it to what the last batch looks at."""
    case = cases("windows, scale, saturating")
    for graph in (case.adding, case):
        operators = [node.op for one in graph.program.graphs.values() for node in one.nodes]
        assert "NPUClearFloatStatusV2" in operators
        assert "NPUGetFloatStatusV2" in operators
    added = [
        node
        for one in case.adding.program.graphs.values()
        for node in one.nodes
        if node.op == "AssignAdd" and "saturated_batches" in node.arguments[0]
    ]
    assert len(added) == 1
