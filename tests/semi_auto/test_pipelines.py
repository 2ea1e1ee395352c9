"""Pipelines of two and four stages on eight devices: the graphs of all stages, which MindSpore compiles, run together
(pipeline_machine.py) and make the whole batch's update."""

from __future__ import annotations

import numpy as np
import pytest

from tests.semi_auto.compiled import SECOND_COMPILER
from tests.semi_auto.pipeline_cases import OPTIONS
from tests.semi_auto.pipeline_machine import Deadlock
from tests.semi_auto.pipelined import RATE, RanPipeline, WholeUpdate, batch, parts_of

pytestmark = [pytest.mark.distributed, SECOND_COMPILER]

# Each option in each layout with two or four stages, so that all pairs are there. One is in the quick suite.
QUICK = [("ratio, scale", "dp", 4)]
PAIRS = [
    ("plain", "split", 2),
    ("plain", "op", 4),
    ("plain, clip", "split", 4),
    ("plain, clip", "sg", 2),
    ("plain, scale", "op", 2),
    ("plain, scale", "lazy dp", 4),
    ("plain, scale alone", "dp", 2),
    ("plain, scale alone", "split", 4),
    ("plain, aux", "op", 4),
    ("per sample", "sg", 2),
    ("per sample", "dp", 4),
    ("ratio", "split", 4),
    ("ratio", "op", 2),
    ("ratio, clip", "dp", 2),
    ("ratio, clip", "sg", 4),
    ("ratio, scale", "split", 2),
    ("ratio, clamped", "op", 4),
    ("ratio, aux", "lazy dp", 2),
    ("sum, count", "op", 2),
    ("sum, count", "dp", 4),
    ("mean, count", "split", 2),
    ("mean, count", "op", 4),
]
THOROUGH = [pytest.param(*pair, marks=pytest.mark.thorough) for pair in PAIRS]


def run(cases, option, layout, stages, data=None, **others):
    return RanPipeline(cases, f"{option}, {layout}, {stages} stages", stages, layout, data, **others)


def whole_of(option, ran, data):
    options = OPTIONS[option]
    masked = options.get("returns") in ("ratio", "sum", "mean")
    clip, least = options.get("max_grad_norm"), options.get("min_count", 0.0)
    return WholeUpdate(ran.values, data, masked=masked, clip=clip, min_count=least)


# -- the same update as the whole batch --------------------------------------------------------------------------------


@pytest.mark.parametrize(("option", "layout", "stages"), [*QUICK, *THOROUGH])
def test_equals_the_whole_batch_on_every_stage(cases, option, layout, stages):
    data = batch(parts_of(layout, stages))
    ran = run(cases, option, layout, stages, data)
    whole = whole_of(option, ran, data)
    binds = "max_grad_norm" in OPTIONS[option]
    assert ran.distance(whole) < (1e-4 if binds else 1e-5)
    np.testing.assert_allclose(ran.losses, [whole.loss] * 8, rtol=1e-5)
    if binds:
        assert whole.norm > OPTIONS[option]["max_grad_norm"]
        np.testing.assert_allclose(ran.parameter("gaccum_ms.grad_norm"), [whole.norm] * 8, rtol=1e-4)
    if OPTIONS[option].get("returns") in ("ratio", "sum", "mean"):
        assert [float(count) for count in ran.parameter("gaccum_ms.window_count")] == [whole.total] * 8
    if "aux" in option:  # the second output of the step, a sum of all micro-batches' squares
        squares = WholeUpdate(ran.values, data).loss * len(data[0])
        expected = squares / 4 if option == "plain, aux" else squares / whole.total
        outputs = [result[1] for of_stage in ran.results for result in of_stage]
        np.testing.assert_allclose(outputs, [expected] * 8, rtol=1e-5)


def test_another_update_is_seen(cases):
    """Negative control: each of these was a fault of another project's pipeline. The sum for the mean, a division by
    each micro-batch's own total, the last micro-batch alone, and one stage's norm for the whole."""
    option, layout, stages = QUICK[0]
    data = batch(parts_of(layout, stages))
    ran = run(cases, option, layout, stages, data)
    whole = whole_of(option, ran, data)
    for factor in (4.0, 0.25, 1.01):
        wrong = whole_of(option, ran, data)
        wrong.after = {name: wrong.before[name] + factor * (value - wrong.before[name]) for name, value in whole.after.items()}
        assert ran.distance(wrong) > 1e-3
    last = [np.concatenate([part[-4:] for part in np.split(one, parts_of(layout, stages))]) for one in data]
    assert ran.distance(whole_of(option, ran, last)) > 1e-3
    norms = [np.sqrt(sum((g**2).sum() for name, g in whole.gradients.items() if f".{stage}." in name)) for stage in range(4)]
    assert max(norms) < whole.norm * (1 - 1e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["framework", "AutoParallel", "AutoParallel, model", "model", "gpipe", "1f1b", "folded"])
def test_schedules_and_ways_to_ask_for_a_pipeline(cases, name):
    ran = RanPipeline(cases, f"pipeline, {name}", 2)
    whole = WholeUpdate(ran.values, batch(4))
    assert ran.distance(whole) < 1e-5
    if name == "framework":  # MindSpore's own cell reports the sum of the losses, on the last stage
        np.testing.assert_allclose(ran.losses, [0.0] * 4 + [4 * whole.loss] * 4, rtol=1e-5)
    else:
        np.testing.assert_allclose(ran.losses, [whole.loss] * 8, rtol=1e-5)
