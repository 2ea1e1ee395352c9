"""Pipelines of two and four stages on eight devices: the graphs of all stages, which MindSpore compiles, run together
(machine.py) and make the whole batch's update. Each option in pipelines: test_batch_sums.py."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

from gaccum_ms.semi_auto.pipeline import explained_errors
from tests.semi_auto.ran import Ran, batch
from tests.semi_auto.whole_batch import Update

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("parallel")]


def ran_pipeline(cases, name, data=None):
    ran = Ran(cases(f"pipeline, {name}", 2), name, data, stages=2)
    return ran, Update(ran.values, ran.data, masked=False, clip=1.0 if "tied" in name else None)


@pytest.mark.parametrize("name", ["framework", "AutoParallel", "full batch", "gpipe", "folded"])
def test_schedules_and_ways_to_ask_for_a_pipeline(cases, name):
    ran, whole = ran_pipeline(cases, name)
    assert ran.distance(whole) < 1e-5
    # MindSpore's own cell reports the sum of the losses, on the last stage.
    expected = [0.0] * 4 + [4 * whole.loss] * 4 if name == "framework" else [whole.loss] * 8
    np.testing.assert_allclose(ran.losses, expected, rtol=1e-5)


def test_sends_and_reduces_what_mindspores_own_cell_does_and_one_number(cases):
    ours, theirs = (ran_pipeline(cases, name)[0] for name in ("AutoParallel", "framework"))
    for one, other in zip(ours.stages, theirs.stages, strict=True):
        sent, expected = (Counter(node.op for node in stage.executed) for stage in (one, other))
        for op in ("Send", "Receive", "AllGather", "ReduceScatter"):
            assert sent[op] <= expected[op], op
        assert sent["AllReduce"] <= expected["AllReduce"] + 1


def test_casts_of_weights(cases):
    ran, whole = ran_pipeline(cases, "half")
    assert 1e-4 < ran.distance(whole) < 1e-2  # of float16


def test_a_weight_of_two_stages_is_in_the_norm_once_and_its_copy_in_no_checkpoint(cases):
    ran, whole = ran_pipeline(cases, "tied, whole", batch(parts=4, width=12))
    assert ran.distance(whole) < 1e-4
    np.testing.assert_allclose(ran.parameter("gaccum_ms.grad_norm"), [whole.norm] * 8, rtol=1e-5)
    first = cases("pipeline, tied, whole", 2)
    assert "enter.table" in first.stage(1).copies  # `mindspore.save_checkpoint` leaves these out
    assert not first.copies
    copies = ran.stages[1].state["enter.table"]
    assert all(np.array_equal(copy, ran.values["enter.table"]) for copy in copies)


def test_a_weight_of_two_stages_that_is_sharded_is_explained(cases):
    with (
        pytest.raises(ValueError, match=r"must lie whole on each device, .* parallel_optimizer=False"),
        explained_errors(),
    ):
        raise ValueError(cases("pipeline, tied, op", 2).message)  # MindSpore's own, of the first stage


@pytest.mark.parametrize(
    ("name", "stages", "message"),
    [
        ("too few", 4, "must be at least the number of pipeline stages, .* but got micro_size=2 and 4 stages"),
        ("one without a stage", 2, "'pipeline_stage' of 0 to 1, .* but got none for layers.1.weight, layers.1.bias"),
        ("frozen", 2, r"each of the 2 pipeline stages must have a trained weight, but got none for stage\(s\) 1"),
        ("several losses", 2, "in a pipeline the network must return one loss"),
        ("state of all weights", 2, "in a pipeline 'state_like' must be .* but got '.*', another"),
        ("outputs of samples", 2, r"in a pipeline each output beside the loss must be a Tensor of shape \(\)"),
    ],
)
def test_refused_on_all_stages_alike(cases, name, stages, message):
    case = cases(f"pipeline, {name}", stages)
    for stage in range(stages):
        assert re.search(f"For '\\w+', .*{message}", case.stage(stage).message)
