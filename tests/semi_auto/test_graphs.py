"""Our step's graphs, compiled by MindSpore for eight devices and simulated without one (machine.py), make the whole
batch's update. The contents of the graphs: test_collectives.py."""

from __future__ import annotations

import numpy as np
import pytest

from tests.semi_auto.compiled import THOROUGH
from tests.semi_auto.machine import rows
from tests.semi_auto.ran import RANKS, WEIGHTS, Ran, X, Y, by_hand, lies, part, same_update

pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("parallel")]


# -- the machine itself ------------------------------------------------------------------------------------------------


@pytest.mark.core(name="plain")
@pytest.mark.parametrize(("name", "factor"), [("plain", 1 / RANKS), ("plain, sum of ranks", 1.0)])
def test_the_machine_computes_what_numpy_does(cases, name, factor):
    """MindSpore's own step makes one SGD update at rate 0.1, with the mean over all ranks. A mean loss is a mean over
    all ranks already; with ``gradients_mean`` the gradient is divided by the number of ranks once more."""
    values, ran = cases(name).parameters, Ran(cases(name))
    loss, gradients = by_hand(values)
    np.testing.assert_allclose(ran.losses, [loss] * RANKS, rtol=1e-5)
    for weight, gradient in gradients.items():
        for after in ran.parameter(weight):
            np.testing.assert_allclose((values[weight] - after) / 0.1, factor * gradient, rtol=1e-3, atol=1e-5)


# -- the same update as the whole batch --------------------------------------------------------------------------------


@pytest.mark.core(name=["ours, 4", "per sample, 4"])
@pytest.mark.parametrize(
    ("name", "whole"),
    [
        *((f"ours, {k}", "plain") for k in (1, 4, 16)),
        *((f"per sample, {k}", "plain") for k in (1, 4)),
        ("lazy, 4", "plain"),
        ("sum of ranks", "plain, sum of ranks"),
        ("sum", "plain, sum"),
        ("auto", "plain"),
        ("context by init", "plain"),
        ("AutoParallel", "plain"),
        ("AutoParallel, model", "plain"),
        ("documented", "plain, sum of ranks"),
        *((f"optimizer parallel, {k}", "plain, optimizer parallel") for k in (1, 4)),
        *(
            pytest.param(f"sharded gradients{cut}", "plain, optimizer parallel, sum of ranks", marks=marks)
            for cut, marks in (("", ()), (", one micro-batch", THOROUGH))
        ),
        ("full batch", "plain, full batch"),
    ],
)
def test_equals_the_whole_batch(cases, name, whole):
    parts = 1 if name == "full batch" else RANKS
    ours, theirs = Ran(cases(name), parts), Ran(cases(whole), parts)
    assert same_update(ours, theirs)
    assert not same_update(ours, Ran(cases(whole), parts, batch=(X, -Y)))  # another update is detected


@pytest.mark.core(name="uneven")
@pytest.mark.parametrize(
    ("name", "parts", "layout"),
    [
        ("uneven", RANKS, None),
        ("lazy uneven", RANKS, None),
        ("frozen", RANKS, None),
        ("interleaved", RANKS, None),
        ("weight shards", RANKS, lies(**dict.fromkeys(WEIGHTS, part(4)))),
        ("no data parallel", 1, lies(first=part(RANKS, axis=1), bias=part(RANKS), second=part(RANKS))),
        ("named axes", 4, lies(first=part(2, axis=1), second=part(2))),
    ],
)
def test_mindspores_own_cases_equal_the_whole_batch(cases, name, parts, layout):
    """The cases are from MindSpore's unit tests of its own cell, which check no number."""
    ours, theirs = (Ran(cases(f"{name}, {how}"), parts, layout=layout) for how in ("4", "whole"))
    assert same_update(ours, theirs)
    assert not same_update(ours, Ran(cases(f"{name}, whole"), parts, batch=(X, -Y), layout=layout))
    moved = [not np.array_equal(*two) for two in zip(ours.parameter("second"), ours.before["second"], strict=True)]
    assert moved == [name != "frozen"] * RANKS


def test_the_wrapped_network_predicts(cases):
    """Called by itself, the cell computes the network on the whole batch. MindSpore's own cell fails here."""
    ran = Ran(cases("predict"), 1)
    np.testing.assert_allclose(ran.losses, [by_hand(cases("predict").parameters)[0]] * RANKS, rtol=1e-5)


def test_a_step_that_does_not_clear_is_seen(cases, plain):
    """Negative control: if the accumulators begin with other values than 0, the update is not the whole batch's."""
    left_over = {"accu_grads." + name: np.full_like(cases("ours, 4").parameters[name], 0.01) for name in WEIGHTS}
    assert not same_update(Ran(cases("ours, 4"), changed=left_over), plain)


@pytest.mark.core(name="ours, 4")
@pytest.mark.parametrize(
    ("name", "whole"),
    [
        *((name, "plain") for name in ("ours, 4", "lazy, 4", "per sample, 4")),
        ("optimizer parallel, 4", "plain, optimizer parallel"),
        ("sharded gradients", "plain, optimizer parallel, sum of ranks"),
    ],
)
def test_two_updates_clear_between_them(cases, name, whole):
    ran = Ran(cases(name), steps=2)
    assert same_update(ran, Ran(cases(whole), steps=2))
    for weight in WEIGHTS:
        assert not np.any(ran.parameter("accu_grads." + weight))


@pytest.mark.thorough
def test_min_count_is_the_least_total_of_all_devices(cases):
    """Also of a batch that counts nothing, which then updates."""
    for y in (Y, -np.abs(Y)):
        clamped, summed = Ran(cases("count, clamped"), batch=(X, y)), Ran(cases("plain, sum"), batch=(X, y))
        np.testing.assert_allclose(clamped.losses, np.array(summed.losses) / 1000, rtol=1e-5)
        for weight in WEIGHTS:
            before = cases("count, clamped").parameters[weight]
            expected = before + (summed.parameter(weight)[0] - before) / 1000
            assert not np.array_equal(expected, before)
            for after in clamped.parameter(weight):
                np.testing.assert_allclose(after, expected, rtol=1e-4, atol=1e-6)


# -- what is refused, before the compiler refuses it -------------------------------------------------------------------


def test_the_mean_of_sharded_gradients_is_refused(cases):
    assert "gradients_mean" in cases("sharded gradients, mean").message


@pytest.mark.thorough
def test_mindspores_own_cell_takes_the_mean_of_some_sharded_gradients(cases):
    """It takes the mean for weights that lie whole on each rank, and the sum for the others, so ours refuses."""
    theirs, whole = Ran(cases("sharded gradients, mean, framework")), Ran(cases("plain, optimizer parallel"))
    before = cases("plain").parameters
    moved = {
        name: [
            np.abs(before[name][:4].ravel()[:4] - ran.parameter(name)[0][:4].ravel()[:4]).sum()
            for ran in (theirs, whole)
        ]
        for name in WEIGHTS
    }
    assert moved["first"][0] == pytest.approx(moved["first"][1], rel=1e-3)
    assert moved["second"][0] == pytest.approx(RANKS * moved["second"][1], rel=1e-3)


def moved(ran, rank=0):
    """The movement of a rank's part of each weight."""
    of_weights = (name for name in ran.before if name.endswith(("weight", "bias")) and name.count(".") < 4)
    return {
        name: ran.parameter(name)[rank].astype(np.float64) - ran.before[name][rank]
        for name in of_weights
        if not name.startswith(("accu", "stat"))
    }


@pytest.mark.core(name="half")
@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("half", "half, whole"),
        ("half, tied", "half, whole"),
        pytest.param("half, ratio, clip", "half, ratio, clip, whole", marks=THOROUGH),
        *(pytest.param(f"half, {layout}", "half, whole", marks=THOROUGH) for layout in ("op", "sg")),
        *((f"amp {level}", f"amp {level}, whole") for level in ("O1", "O2", "O3", "auto")),
    ],
)
def test_casts_of_weights_equal_the_whole_batch_in_the_same_precision(cases, name, whole):
    ran, theirs = Ran(cases(name)), moved(Ran(cases(whole)))
    assert theirs
    for weight, movement in theirs.items():
        largest = np.abs(movement).max()
        assert largest > 0
        for rank in range(RANKS):
            part = moved(ran, rank)[weight]
            expected = rows(part.shape)(movement, rank)
            np.testing.assert_allclose(part / largest, expected / largest, atol=3e-3)  # of float16


def test_what_needs_lazy_inline_is_refused_on_gpu(cases):
    """An H100 refused such graphs: "Input[0] must be a Primitive ValueNode" ."""
    for name, what in (("half, gpu", "a cast of the weights of"), ("lazy, gpu", "it on the __init__ of 'LazyDense'")):
        assert f"which MindSpore runs on Ascend only, but got {what}" in cases(name).message


def test_a_norm_of_a_batch_that_is_not_cut_is_refused_with_lazy_inline(cases):
    """It was larger by the root of the number of devices."""
    assert "the norm of a batch of one micro-batch once for each device" in cases("lazy, one micro-batch, clip").message


@pytest.mark.thorough
def test_casts_of_weights_with_lazy_inline(cases):
    assert "Cannot find micro info" in cases("half, framework").message  # MindSpore's error for its own cell
    for name in ("half, lazy", "half, lazy inside"):
        assert cases(name).program.entry.nodes


@pytest.mark.parametrize(
    ("name", "message"),
    [("functional", "must not be differentiated"), ("functional, training", "the cell itself is being trained")],
)
def test_a_functional_gradient_is_refused(cases, name, message):
    assert message in cases(name).message
    assert "gaccum_ms.TrainOneStepWithGradAccumulationCell(cell, optimizer)" in cases(name).message


def test_auto_parallel_goes_around_the_cell(cases):
    assert "put it around the cell and not around the step" in cases("AutoParallel around the step").message


def test_an_autoparallels_own_settings_are_looked_at(cases):
    assert "with pipeline_stages=2 each trained weight must" in cases("AutoParallel, pipeline").message
