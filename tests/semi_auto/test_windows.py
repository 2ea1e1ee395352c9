"""Windows of several batches: one graph adds, another adds and updates. Both share the accumulators."""

from __future__ import annotations

import numpy as np
import pytest

from tests.semi_auto.cases import OPTIONS
from tests.semi_auto.ran import RANKS, WEIGHTS, Ran, batch
from tests.semi_auto.whole_batch import Update

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("parallel")]


def joined(*batches):
    return tuple(np.concatenate(parts) for parts in zip(*batches, strict=True))


def run(cases, option, layout, batches, windows):
    """The graphs after these batches, and the updates by whole windows."""
    case, options = cases(f"{option}, {layout}"), OPTIONS[option]
    ran = Ran.windows(case, layout, batches, 1024.0 if "scale" in option else 1.0)
    values = case.parameters
    for window in windows:
        clip, least = options.get("max_grad_norm"), options.get("min_count", 0.0)
        whole = Update(values, window, clip=clip, min_count=least)
        values = {**values, **whole.after}
    return ran, whole


@pytest.mark.parametrize(
    ("option", "layout"),
    [
        ("windows, clip", "split"),
        ("windows, scale", "ws"),
        ("windows, aux", "dp"),
        ("windows, sum, count, clamped", "sg"),
    ],
)
def test_two_windows_of_two_batches_equal_two_updates(cases, option, layout):
    batches = [batch(seed) for seed in range(1, 5)]
    ran, whole = run(cases, option, layout, batches, [joined(*batches[:2]), joined(*batches[2:])])
    assert ran.distance(whole) < 1e-4
    np.testing.assert_allclose(ran.parameter("gaccum_ms.window_loss"), [whole.loss] * RANKS, rtol=1e-5)
    assert [float(one) for one in ran.parameter("gaccum_ms.window_count")] == [whole.totals[0]] * RANKS
    assert [float(one) for one in ran.parameter("gaccum_ms.window_batches")] == [2.0] * RANKS
    assert not any(np.any(ran.parameter("accu_grads." + name)) for name in WEIGHTS)


@pytest.mark.parametrize(("kind", "layout"), [("mean", "dp"), ("sum", "op")])
def test_a_window_of_three_batches_that_count_nothing(cases, kind, layout):
    """A mean is over the samples of all batches. Nothing divides a sum."""
    batches = [batch(seed) for seed in (1, 2, 3)]
    ran = Ran.windows(cases(f"windows, {kind}, {layout}"), layout, batches, steps=3)
    whole = Update(ran.values, joined(*batches), masked=False)
    factor = 1.0 if kind == "mean" else whole.totals[0]
    whole.move(lambda gradient: factor * gradient)
    assert ran.distance(whole) < 1e-5
    np.testing.assert_allclose(ran.parameter("gaccum_ms.window_loss"), [factor * whole.loss] * RANKS, rtol=1e-5)


def test_a_flush_divides_by_the_batches_that_there_are(cases):
    """The batch that does not end its window reduces no gradient."""
    data = batch(1)
    ran, whole = run(cases, "windows, clip", "split", [data, "flush"], [data])
    assert not ran.adding.gradient_collectives()
    assert ran.gradient_collectives()
    assert ran.distance(whole) < 1e-4
    np.testing.assert_allclose(ran.parameter("gaccum_ms.window_loss"), [whole.loss] * RANKS, rtol=1e-5)
    assert [float(one) for one in ran.parameter("gaccum_ms.window_batches")] == [1.0] * RANKS
