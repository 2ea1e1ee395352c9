"""Transforms where a gradient is one device's part."""

from __future__ import annotations

import numpy as np
import pytest

from tests.semi_auto.ran import RANKS, WEIGHTS
from tests.semi_auto.test_batch_sums import run

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("parallel")]


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
