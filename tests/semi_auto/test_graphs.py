"""Our step's graphs, compiled by MindSpore for eight devices and simulated without one (machine.py), make the whole
batch's update."""

from __future__ import annotations

import numpy as np
import pytest

from tests.semi_auto.ran import RANKS, WEIGHTS, Ran, batch
from tests.semi_auto.whole_batch import Update

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("parallel")]

# A mean loss is a mean over all ranks already; with ``gradients_mean`` the gradient is divided by the number of ranks
# once more, by MindSpore's own step ("plain") too.
MEAN = 1 / RANKS


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("plain", MEAN),
        ("ours, 1", MEAN),
        ("ours, 4", MEAN),
        ("per sample, 4", MEAN),
        ("context by init", MEAN),  # nobody says how many devices there are
        ("sum", len(batch()[0])),
        ("documented", 1.0),
        ("full batch", 1.0),
        # Of MindSpore's unit tests of its own cell, which check no number.
        ("frozen", 1.0),
        ("interleaved", 2.0),  # the sum of two halves' means
        ("no data parallel", 1.0),
        ("named axes", 1.0),
    ],
)
def test_two_updates_equal_the_whole_batchs(cases, name, factor):
    case = cases(name)
    ran, values = Ran(case, name, steps=0), case.parameters
    for seed in (1, 2):
        ran.step(data := batch(seed))
        whole = Update(values, data, masked=False).move(lambda gradient: factor * gradient)
        np.testing.assert_allclose(ran.losses, [whole.loss * max(factor, 1)] * RANKS, rtol=1e-5)
        if name == "frozen":
            del whole.after[WEIGHTS[-1]]
            assert not any(ran.moved(WEIGHTS[-1:]))
        assert ran.distance(whole) < 1e-4
        values = values | whole.after


def test_the_wrapped_network_predicts(cases):
    """Called by itself, the cell computes the network on the whole batch. MindSpore's own cell fails here."""
    ran = Ran(cases("predict"), "full batch")
    np.testing.assert_allclose(ran.losses, Update(ran.values, ran.data, masked=False).loss, rtol=1e-5)


@pytest.mark.parametrize("name", ["half", "half, tied"])
def test_casts_of_weights_equal_the_whole_batch_in_the_same_precision(cases, name):
    """By `to_float` , or tied to the layer's input, as the error for GPU says."""
    ran, theirs = Ran(cases(name)), Ran(cases("half, whole"))
    weights = [weight for weight in ran.values if f"stat.{weight}" in ran.values]
    assert all(theirs.moved(weights))
    for weight in weights:
        before = ran.values[weight].astype(np.float64)
        np.testing.assert_array_equal(before, theirs.values[weight])
        expected = theirs.parameter(weight)[0] - before
        for after in ran.parameter(weight):
            assert np.abs(after - before - expected).max() < 3e-3 * np.abs(expected).max()  # of float16


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sharded gradients, mean", "'gradients_mean' must be False"),
        # An H100 refused such graphs: "Input[0] must be a Primitive ValueNode".
        ("half, gpu", "which MindSpore runs on Ascend only, but got a cast of the weights of"),
        ("lazy, gpu", "which MindSpore runs on Ascend only, but got it on the __init__ of 'LazyDense'"),
        # The norm was larger by the root of the number of devices.
        ("lazy, one micro-batch, clip", "the norm of a batch of one micro-batch once for each device"),
        ("AutoParallel around the step", "put it around the cell and not around the step"),
        ("AutoParallel, pipeline", "with pipeline_stages=2 each trained weight must"),
    ],
)
def test_refused_before_the_compiler_refuses_it(cases, name, words):
    assert words in cases(name).message
