"""Transforms where a gradient is one device's part: right, or refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from tests.semi_auto import whole_batch
from tests.semi_auto.compiled import SECOND_COMPILER, THOROUGH
from tests.semi_auto.machine import rows
from tests.semi_auto.ran import RANKS, WEIGHTS, Ran

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("parallel")]


def run(cases, option, layout):
    """The graph after one run, and the whole batch's update without transforms."""
    case, (parts, places), batch = cases(f"{option}, {layout}"), whole_batch.place(layout), whole_batch.batch()
    return Ran(case, parts, batch, places), whole_batch.Update(case.parameters, batch)


@pytest.mark.thorough
@SECOND_COMPILER
@pytest.mark.parametrize("layout", ["op", "split", "sg"])
def test_each_element_is_clipped_by_itself(cases, layout):
    ran, whole = run(cases, "clip by value", layout)
    assert max(np.abs(gradient).max() for gradient in whole.gradients.values()) > 0.02
    whole.move(lambda gradient: np.clip(gradient, -0.02, 0.02))
    assert whole_batch.distance(ran, whole, layout) < 1e-4


@pytest.mark.thorough
@SECOND_COMPILER
@pytest.mark.parametrize("layout", ["split", "ws", "sg"])
def test_a_transform_has_a_number_for_each_element_of_a_weight(cases, layout):
    """Its `state_like` lies as the weight does."""
    ran, whole = run(cases, "momentum", layout)
    whole.move(lambda gradient: gradient + 0.9 * 0.5)
    assert whole_batch.distance(ran, whole, layout) < 1e-5
    for name in WEIGHTS:
        for state, weight in zip(ran.parameter("gaccum_ms.moment." + name), ran.parameter(name), strict=True):
            assert state.shape == weight.shape


@pytest.mark.parametrize(
    ("option", "layout"),
    [
        ("spikes", "split"),
        *(
            pytest.param(*pair, marks=THOROUGH)
            for pair in [("spikes", "op"), ("spikes", "sg"), ("spikes, scale", "split"), ("spikes, scale", "sg")]
        ),
    ],
)
def test_spikes_and_clips_have_the_norm_of_the_whole(cases, option, layout):
    """Also behind the ``if`` around an update that may overflow."""
    ran, whole = run(cases, option, layout)
    np.testing.assert_allclose(ran.parameter("gaccum_ms.judged_norm"), [whole.norm] * RANKS, rtol=1e-4)
    whole.move(lambda gradient: gradient * 0.1 / whole.norm)
    assert whole_batch.distance(ran, whole, layout) < 1e-4


@pytest.mark.thorough
@SECOND_COMPILER
@pytest.mark.parametrize("layout", ["dp", "sg"])
def test_a_spike_updates_on_no_rank(cases, layout):
    ran, whole = run(cases, "skipped", layout)
    assert whole.norm > 0.1  # the limit
    for name in WEIGHTS:
        assert all(np.array_equal(*two) for two in zip(ran.parameter(name), ran.before[name], strict=True))
    assert [int(number) for number in ran.parameter("gaccum_ms.skipped_updates")] == [1] * RANKS


@pytest.mark.thorough
@SECOND_COMPILER
@pytest.mark.parametrize("layout", ["split", "op", "sg"])
def test_averages_lie_as_their_weights_do(cases, layout):
    ran, whole = run(cases, "average", layout)
    parts = whole_batch.place(layout)[1]
    for name, after in whole.after.items():
        average = 0.75 * whole.before[name] + 0.25 * after
        for rank, (own, weight) in enumerate(
            zip(ran.parameter("gaccum_ms.average." + name), ran.parameter(name), strict=True)
        ):
            assert own.shape == weight.shape
            expected = parts[name](average, rank) if parts else rows(own.shape)(average, rank)
            np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)
    assert whole_batch.distance(ran, whole, layout) < 1e-5
