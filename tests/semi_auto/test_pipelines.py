"""Pipelines of two and four stages on eight devices: the graphs of all stages, which MindSpore compiles, run together
(pipeline_machine.py) and make the whole batch's update."""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from gaccum_ms.semi_auto.pipeline import explained_errors
from tests.semi_auto.pipeline_cases import OPTIONS
from tests.semi_auto.pipeline_machine import Deadlock
from tests.semi_auto.pipelined import RanPipeline, WholeUpdate, batch, parts_of

pytestmark = pytest.mark.distributed
quick = pytest.mark.xdist_group("parallel")
# The thorough tests have a compiler of their own, so that all tests keep two cores busy.
MARKS = [pytest.mark.thorough, pytest.mark.xdist_group("parallel, pipelines")]

# Each option in each layout with two or four stages, so that all pairs are there. One is in the quick suite.
QUICK = ("ratio, scale", "split", 2)
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
    ("per sample", "split", 2),
    ("ratio", "split", 4),
    ("ratio", "op", 2),
    ("ratio, clip", "dp", 2),
    ("ratio, clip", "sg", 4),
    ("ratio, scale", "dp", 4),
    ("ratio, clamped", "op", 4),
    ("ratio, aux", "lazy dp", 2),
    ("ratio, aux", "auto", 4),
    ("sum, count", "op", 2),
    ("sum, count", "dp", 4),
    ("mean, count", "split", 2),
    ("mean, count", "op", 4),
]
PARAMETERS = [pytest.param(*QUICK, marks=quick), *(pytest.param(*pair, marks=MARKS) for pair in PAIRS)]


def thorough(test):
    for mark in MARKS:
        test = mark(test)
    return test


def run(cases, option, layout, stages, data=None, **others):
    return RanPipeline(cases, f"{option}, {layout}, {stages} stages", stages, layout, data, **others)


def whole_of(option, ran, data):
    options = OPTIONS[option]
    masked = options.get("returns") in ("ratio", "sum", "mean")
    clip, least = options.get("max_grad_norm"), options.get("min_count", 0.0)
    return WholeUpdate(ran.values, data, masked=masked, clip=clip, min_count=least)


# -- the same update as the whole batch --------------------------------------------------------------------------------


@pytest.mark.parametrize(("option", "layout", "stages"), PARAMETERS)
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


@quick
def test_another_update_is_seen(cases):
    """Negative control: each of these was a fault of another project's pipeline. The sum for the mean, a division by
    each micro-batch's own total, the last micro-batch alone, and one stage's norm for the whole."""
    option, layout, stages = QUICK
    data = batch(parts_of(layout, stages))
    ran = run(cases, option, layout, stages, data)
    whole = whole_of(option, ran, data)
    for factor in (4.0, 0.25, 1.01):
        moved = {name: factor * (value - whole.before[name]) for name, value in whole.after.items()}
        assert ran.distance(SimpleNamespace(after={name: whole.before[name] + by for name, by in moved.items()})) > 1e-3
    last = [np.concatenate([part[-4:] for part in np.split(one, parts_of(layout, stages))]) for one in data]
    assert ran.distance(whole_of(option, ran, last)) > 1e-3
    squares = [
        sum((one**2).sum() for name, one in whole.gradients.items() if name.startswith(layers))
        for layers in (("layers.0.", "layers.1."), ("layers.2.", "layers.3."))
    ]
    assert np.sqrt(max(squares)) < whole.norm * (1 - 1e-3)


@thorough
@pytest.mark.parametrize(
    "name", ["framework", "AutoParallel", "AutoParallel, model", "model", "full batch", "gpipe", "1f1b", "folded"]
)
def test_schedules_and_ways_to_ask_for_a_pipeline(cases, name):
    ran = RanPipeline(cases, f"pipeline, {name}", 2, name, batch(4))
    whole = WholeUpdate(ran.values, batch(4))
    assert ran.distance(whole) < 1e-5
    if name == "framework":  # MindSpore's own cell reports the sum of the losses, on the last stage
        np.testing.assert_allclose(ran.losses, [0.0] * 4 + [4 * whole.loss] * 4, rtol=1e-5)
    else:
        np.testing.assert_allclose(ran.losses, [whole.loss] * 8, rtol=1e-5)


@thorough
def test_casts_equal_mindspores_own_in_the_same_precision(cases):
    """Each as far from float32 as the other: the order of float16's roundings differs."""
    ours, theirs = (RanPipeline(cases, f"pipeline, half{other}", 2) for other in ("", ", framework"))
    whole = WholeUpdate(ours.values, batch(4))
    assert ours.distance(whole) < max(1.5 * theirs.distance(whole), 3e-3)
    assert theirs.distance(whole) > 1e-4


@thorough
def test_transforms_see_the_whole_gradient(cases):
    data = batch(parts_of("op", 2))
    clipped, spikes, skipped, averaged = (
        run(cases, option, "op", 2, data) for option in ("clip by value", "spikes", "skipped", "average")
    )
    whole = WholeUpdate(clipped.values, data, clip=1.0)
    assert spikes.distance(whole) < 1e-4
    assert clipped.distance(whole.move(lambda gradient: np.clip(gradient, -0.02, 0.02))) < 1e-4
    assert averaged.distance(whole.move(lambda gradient: gradient)) < 1e-5
    assert averaged.distance(whole.move(lambda gradient: 0.25 * gradient), "gaccum_ms.average.") < 1e-5
    assert not skipped.has_moved(whole.after)
    assert spikes.has_moved(whole.after)


# -- weights of two stages ---------------------------------------------------------------------------------------------


@thorough
def test_a_weight_of_two_stages_is_in_the_norm_once_and_its_copy_in_no_checkpoint(cases):
    data = batch(4, width=12)
    ran = RanPipeline(cases, "pipeline, tied", 2, data=data)
    whole = WholeUpdate(ran.values, data, clip=1.0)
    assert ran.distance(whole) < 1e-4
    np.testing.assert_allclose(ran.parameter("gaccum_ms.grad_norm"), [whole.norm] * 8, rtol=1e-5)
    last = cases("pipeline, tied", 2).stage(1)
    assert "enter.table" in last.copies  # `mindspore.save_checkpoint` leaves these out
    assert not cases("pipeline, tied", 2).copies
    unmoved = ran.pipeline.stages[1].state["enter.table"]
    assert all(np.array_equal(copy, ran.values["enter.table"]) for copy in unmoved)


@thorough
def test_a_weight_of_two_stages_in_the_norm_twice_is_seen(cases):
    """Negative control."""
    data = batch(4, width=12)
    ran = RanPipeline(cases, "pipeline, tied, counted twice", 2, data=data)
    norm = WholeUpdate(ran.values, data).norm
    assert not np.allclose(ran.parameter("gaccum_ms.grad_norm"), norm, rtol=1e-3)


@thorough
def test_a_weight_of_two_stages_that_lies_whole_trains_with_optimizer_parallel(cases):
    data = batch(4, width=12)
    ran = RanPipeline(cases, "pipeline, tied, whole", 2, data=data)
    assert ran.distance(WholeUpdate(ran.values, data, clip=1.0)) < 1e-4
    with (
        pytest.raises(ValueError, match=r"must lie whole on each device, .* parallel_optimizer=False"),
        explained_errors(),
    ):
        raise ValueError(cases("pipeline, tied, op", 2).message)  # MindSpore's own, of the first stage


# -- overflow, and waiting for one another -----------------------------------------------------------------------------


@thorough
@pytest.mark.parametrize(
    ("option", "layout", "stages"), [("ratio, scale", "dp", 4), ("plain, scale alone", "split", 4)]
)
def test_an_overflow_on_one_device_is_one_on_all_stages(cases, option, layout, stages):
    x, y = batch(parts_of(layout, stages))
    x[3] = np.inf
    ran = run(cases, option, layout, stages, (x, y))
    results = [result for of_stage in ran.results for result in of_stage]
    assert all(result[1] for result in results)
    assert [float(scale.reshape(())) for scale in ran.parameter("gaccum_ms.scale_sense")] == [512.0] * 8
    assert not np.any(ran.parameter("gaccum_ms.update_count"))
    assert not ran.has_moved([name for name in ran.values if name.startswith("layers.")])


@thorough
def test_sends_that_wait_for_their_receives_end(cases):
    data = batch(2)
    ran = run(cases, "ratio, scale", "dp", 4, data, blocks=True)
    assert ran.distance(whole_of("ratio, scale", ran, data)) < 1e-4


@thorough
def test_sums_before_backward_would_wait_for_ever(cases):
    """Negative control: the first stage waits in the AllReduce for one that waits for its Receive."""
    with pytest.raises(Deadlock, match=r"stage \d waits in an AllReduce over ranks .*stage \d waits (until|for)"):
        RanPipeline(cases, "pipeline, sums first", 4, blocks=True)


@quick
def test_a_message_that_crosses_another_is_seen(cases):
    """Negative control of the machine: two Sends of the first stage exchanged."""
    ran = run(cases, *QUICK)
    stage = ran.pipeline.stages[0]
    nodes = list(stage.program.entry.nodes)
    first, second, *_ = (index for index, node in enumerate(nodes) if node.op == "Send")
    sends = nodes[first], nodes[second]
    nodes[first] = sends[0]._replace(attributes=sends[1].attributes)
    nodes[second] = sends[1]._replace(attributes=sends[0].attributes)
    stage.program = stage.program._replace(entry=stage.program.entry._replace(nodes=tuple(nodes)))
    with pytest.raises(AssertionError, match=r"receives 'tag \d+', but rank \d sent 'tag \d+'"):
        ran.pipeline.step(*ran.shards)


# -- what a step sends -------------------------------------------------------------------------------------------------


@thorough
def test_two_updates_clear_between_them(cases):
    data = batch(2)
    ran = run(cases, "ratio", "op", 4, data, steps=2)
    first = WholeUpdate(ran.values, data, masked=True)
    whole = WholeUpdate({**ran.values, **first.after}, data, masked=True)
    assert ran.distance(whole) < 1e-5
    for name in whole.after:
        assert not any(np.any(part) for part in ran.parameter(f"accu_grads.{name}"))


@thorough
def test_sends_and_reduces_what_mindspores_own_cell_does_and_one_number(cases):
    ours, theirs = RanPipeline(cases, "plain, dp, 2 stages", 2), RanPipeline(cases, "pipeline, framework", 2)
    for one, other in zip(ours.pipeline.stages, theirs.pipeline.stages, strict=True):
        sent, expected = (Counter(done.node.op for done in stage.executed) for stage in (one, other))
        for op in ("Send", "Receive", "AllGather", "ReduceScatter"):
            assert sent[op] <= expected[op], op
        assert sent["AllReduce"] <= expected["AllReduce"] + 1


# -- what is refused, before anything is compiled ----------------------------------------------------------------------


@quick
@pytest.mark.parametrize(
    ("name", "stages", "message"),
    [
        ("too few", 4, "must be at least the number of pipeline stages, .* but got micro_size=2 and 4 stages"),
        ("no stage", 2, "each trained weight must belong to a Cell with a 'pipeline_stage' of 0 to 1"),
        ("one without a stage", 2, "but got none for layers.1.weight, layers.1.bias"),
        ("frozen 0", 2, r"each of the 2 pipeline stages must have a trained weight, but got none for stage\(s\) 0"),
        ("frozen 1", 2, r"but got none for stage\(s\) 1"),
        ("several losses", 2, "in a pipeline the network must return one loss"),
        ("outputs of samples", 2, r"in a pipeline each output beside the loss must be a Tensor of shape \(\)"),
    ],
)
def test_refused_on_all_stages_alike(cases, name, stages, message):
    case = cases(f"pipeline, {name}", stages)
    for stage in range(stages):
        assert re.search(message, case.stage(stage).message)
        assert "For 'GradAccumulationCell'" in case.stage(stage).message
