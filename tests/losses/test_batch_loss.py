"""WithBatchLossCell: a loss of the whole batch under micro-batches equals the whole batch's. Ranks:
test_batch_loss_ranks.py."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import warnings

import mindspore as ms
import mindspore.amp
import numpy as np
import pytest
from mindspore import Tensor, nn, ops, train
from support import contrastive, paths
from support.contrastive import (
    InfoNCE,
    Single,
    Spread,
    Towers,
    Whole,
    accumulated,
    batches,
    make_parts,
    whole,
)
from support.reference import OPTIMIZERS, as_numpy, assert_equivalent, relative_error, step_with

from gaccum_ms import (
    AccumulationScheduler,
    FlushAccumulation,
    GradAccumulationCell,
    TrainOneStepWithGradAccumulationCell,
    UpdateCheckpoint,
    WindowBatchNorm,
    WindowMonitor,
    WithBatchLossCell,
    audit,
    resume,
)
from gaccum_ms.accumulation.grad_cache import TwoPasses
from gaccum_ms.accumulation.micro_step import OneLoss
from gaccum_ms.accumulation.weighing import BySamples

DIVISIBLE, RAGGED = 24, 13
TOLERANCE = 1e-5
WAYS = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE, "jit": ms.PYNATIVE_MODE}


@functools.cache
def whole_batch(kind: str, samples: int):
    ms.set_context(mode=ms.GRAPH_MODE)
    return contrastive.train(whole, kind, batches(kind, samples))


def run(kind="towers", samples=RAGGED, way="graph", optimizer=None, **options):
    ms.set_context(mode=WAYS[way])
    jit = {"jit": True} if way == "jit" else {}
    return contrastive.train(accumulated(**options, **jit), kind, batches(kind, samples), optimizer)


# -- equal to the whole batch ------------------------------------------------------------------------------------------


def _matrix():
    """One network x micro_size x ragged in graph mode in full, the others in pairs; eagerly, and compiled in PyNative
    mode, on lines through it."""
    for micro_size in (1, 2, 3, 8):
        for samples in (DIVISIBLE, RAGGED):
            yield "towers", micro_size, samples, "graph"
    for kind in ("labels", "single"):
        for micro_size, samples in ((1, RAGGED), (2, DIVISIBLE), (3, RAGGED)):
            yield kind, micro_size, samples, "graph"
    yield "labels", 8, DIVISIBLE, "graph"
    for kind in ("towers", "labels", "single"):
        yield kind, 3, RAGGED, "pynative"
        yield kind, 3, RAGGED, "jit"
    yield "towers", 1, RAGGED, "pynative"
    yield "labels", 3, DIVISIBLE, "pynative"


@pytest.mark.core(
    *("towers-1-13-graph", "towers-3-13-graph", "towers-8-24-graph", "towers-3-13-pynative", "towers-3-13-jit"),
    *("labels-3-13-graph", "single-3-13-graph"),
)
@pytest.mark.parametrize(("kind", "micro_size", "samples", "way"), list(_matrix()))
def test_equals_the_whole_batch(kind, micro_size, samples, way):
    reference = whole_batch(kind, samples)
    assert_equivalent(run(kind, samples, way, micro_size=micro_size), reference, TOLERANCE)


def test_the_reference_learns_and_so_does_the_temperature():
    """Or the tests here would show less than they say."""
    for kind in contrastive.KINDS:
        reference = whole_batch(kind, RAGGED)
        before = {one.name: as_numpy(one) for part in make_parts(kind) for one in part.trainable_params()}
        assert reference.losses[-1] < reference.losses[0]
        if kind == "single":
            del before["tower.bias"]  # a covariance does not depend on it
        assert min(relative_error(reference.state[name], value) for name, value in before.items()) > 1e-3


@pytest.mark.core("sum-graph", "compensated-graph", "scaled-graph")
@pytest.mark.parametrize("way", ["graph", "pynative"])
@pytest.mark.parametrize(
    "options",
    [
        {"micro_batch_size": 5},
        {"micro_batch_size": 50},
        {"micro_size": 3, "reduction": "sum"},
        {"micro_size": 3, "compensated": True},
        {"micro_size": 3, "accumulator_dtype": None},
        {"micro_size": 3, "scale_sense": Tensor(1024.0, ms.float32)},
        {"micro_size": 1, "scale_sense": Tensor(1024.0, ms.float32)},
    ],
    ids=["samples", "one", "sum", "compensated", "weights' dtype", "scaled", "scaled whole"],
)
def test_options_of_the_cell_change_nothing(options, way):
    assert_equivalent(run(way=way, **options), whole_batch("towers", RAGGED), TOLERANCE)


def test_low_precision_accumulators():
    reference = whole_batch("labels", RAGGED)
    narrow = run("labels", micro_size=4, accumulator_dtype=ms.float16)
    assert_equivalent(narrow, reference, 4e-3)
    with pytest.raises(AssertionError):
        assert_equivalent(narrow, reference, TOLERANCE)
    assert_equivalent(run("labels", micro_size=4, accumulator_dtype=ms.float16, compensated=True), reference, TOLERANCE)


@pytest.mark.core(optimizer="momentum")
@pytest.mark.parametrize("optimizer", ["momentum", "grouped"])
def test_other_optimizers(optimizer):
    reference = contrastive.train(whole, "labels", batches("labels", RAGGED), OPTIMIZERS[optimizer])
    assert_equivalent(run("labels", micro_size=3, optimizer=OPTIMIZERS[optimizer]), reference, TOLERANCE)


class Clipped(nn.Cell):
    """By hand: MindSpore's own makes a scalar's gradient one of shape (1,), which its SGD does not take."""

    def construct(self, gradients):
        squares = 0.0
        for gradient in gradients:
            squares = squares + ops.square(gradient).sum()
        factor = ops.minimum(0.05 / ops.sqrt(squares), 1.0)
        clipped = ()
        for gradient in gradients:
            clipped = (*clipped, gradient * factor)
        return clipped


def clipped_whole(backbone, loss_fn, optimizer):
    step = whole(backbone, loss_fn, optimizer)
    step.grad_reducer = Clipped()
    step.reducer_flag = True
    return step


@pytest.mark.core(mode="graph")
def test_clips_the_finished_gradient(mode):
    reference = contrastive.train(clipped_whole, "towers", batches("towers", RAGGED))
    assert_equivalent(run(way=mode, micro_size=3, max_grad_norm=0.05), reference, TOLERANCE)
    with pytest.raises(AssertionError):  # it does clip
        assert_equivalent(run(way=mode, micro_size=3), reference, TOLERANCE)


@pytest.mark.core(mode="graph")
def test_weights_that_backbone_and_loss_share_and_frozen_ones(mode):
    class Shared(nn.Cell):
        def __init__(self, dense):
            super().__init__()
            self.dense = dense

        def construct(self, values):
            return ops.square(values @ self.dense.weight).sum() + ops.square(values.T @ values).mean()

    runs = []
    for micro_size in (None, 3):
        backbone, _ = make_parts("single")
        backbone.tower.bias.requires_grad = False
        loss_fn = Shared(backbone.tower)
        optimizer = nn.SGD(backbone.trainable_params(), 0.001)
        step = accumulated(micro_size=micro_size) if micro_size else whole
        step = step(backbone, loss_fn, optimizer).set_train()
        runs.append([float(step(*map(Tensor, batch))) for batch in batches("single", RAGGED)])
        runs.append(as_numpy(backbone.tower.weight))
    assert relative_error(np.array(runs[2]), np.array(runs[0])) < TOLERANCE
    assert relative_error(runs[3], runs[1]) < TOLERANCE


@pytest.mark.thorough
def test_short_last_batches():
    data = [batches("towers", samples, 1)[0] for samples in (16, 5, 2, 16)]
    reference = contrastive.train(whole, "towers", data)
    assert_equivalent(contrastive.train(accumulated(micro_size=4), "towers", data), reference, TOLERANCE)


@pytest.mark.core(mode="graph")
def test_called_by_itself_it_is_the_whole_batchs_network(mode):
    backbone, loss_fn = make_parts("labels")
    batch = [Tensor(value) for value in batches("labels", RAGGED, 1)[0]]
    expected = float(Whole(backbone, loss_fn)(*batch))
    network = WithBatchLossCell(backbone, loss_fn)
    assert float(network(*batch)) == pytest.approx(expected, rel=1e-6)
    assert float(GradAccumulationCell(network, 4)(*batch)) == pytest.approx(expected, rel=1e-6)


# -- what is wrong is caught -------------------------------------------------------------------------------------------


class LossOfEachMicroBatch(OneLoss):
    """What accumulation without the second pass is: a micro-batch's negatives are its own alone."""


class SecondPassOfTheLastAlone(BySamples):
    def turn(self, noted, unit, prepared, size, *part):
        return super().turn(noted, self.store.reset(unit), prepared, size, *part)


class OtherOrder(TwoPasses):
    """The representations of the last micro-batch, the first to be there, come first."""

    def appended(self, state, new, rows):
        following: tuple = (state[0] + rows,)
        for index in range(len(new)):
            following = (*following, ops.concat((new[index], state[index + 1][rows:])))
        return following


class SlopesOfOthers(TwoPasses):
    def slopes(self, unit, representations):
        loss, slopes, loss_slopes = super().slopes(unit, representations)
        return loss, [ops.flip(one, (0,)) for one in slopes], loss_slopes


class LossesOwnWeightsLeftOut(TwoPasses):
    def slopes(self, unit, representations):
        loss, slopes, loss_slopes = super().slopes(unit, representations)
        return loss, slopes, [one * 0 for one in loss_slopes]


class LossesOwnWeightsInEachMicroBatch(TwoPasses):
    def along_slopes(self, share, loss_slopes, number, *part):
        return super().along_slopes(1.0, loss_slopes, number, *part)


@pytest.mark.core("graph-LossOfEachMicroBatch", "graph-LossesOwnWeightsInEachMicroBatch")
@pytest.mark.parametrize(
    "broken",
    [
        LossOfEachMicroBatch,
        SecondPassOfTheLastAlone,
        OtherOrder,
        SlopesOfOthers,
        LossesOwnWeightsLeftOut,
        LossesOwnWeightsInEachMicroBatch,
    ],
)
def test_negative_control_a_broken_window_is_caught(broken, mode):
    reference = whole_batch("towers", RAGGED)
    kinds = {"weighing" if issubclass(broken, BySamples) else "micro_step": broken}
    result = run(way=mode, micro_size=3, step_class=step_with(**kinds))
    with pytest.raises(AssertionError):
        assert_equivalent(result, reference, 100 * TOLERANCE)


# -- loss scale, overflow ----------------------------------------------------------------------------------------------


@pytest.mark.core(mode="graph")
def test_an_overflow_changes_nothing_and_lowers_the_scale(mode):
    backbone, loss_fn = make_parts("towers")
    network = WithBatchLossCell(backbone, loss_fn)
    optimizer = OPTIMIZERS["momentum"](network.trainable_params())
    manager = nn.DynamicLossScaleUpdateCell(loss_scale_value=2.0**10, scale_factor=2, scale_window=1000)
    step = TrainOneStepWithGradAccumulationCell(GradAccumulationCell(network, 3), optimizer, manager).set_train()
    good, bad = batches("towers", RAGGED, 2)
    bad[1][7, 0] = np.inf
    assert not step(*map(Tensor, good))[1]
    before = {one.name: as_numpy(one) for one in [*network.get_parameters(), *optimizer.get_parameters()]}
    _, overflow, scale = step(*map(Tensor, bad))
    assert overflow
    assert float(scale) == 1024
    for one in [*network.get_parameters(), *optimizer.get_parameters()]:
        np.testing.assert_array_equal(as_numpy(one), before[one.name])
    loss, overflow, scale = step(*map(Tensor, good))
    assert np.isfinite(float(loss)) and not overflow and float(scale) == 512


@pytest.mark.core(level="O2")
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "auto"])
def test_amp_levels_train_like_the_whole_batch(level):
    """Against MindSpore's own step at the same level, in float16's precision. That the level takes effect shows in a
    difference to float32."""
    finals = []
    for accumulate in (False, True):
        backbone, loss_fn = make_parts("labels")
        network = (WithBatchLossCell if accumulate else Whole)(backbone, loss_fn)
        optimizer = nn.SGD(network.trainable_params(), 0.05)
        cell = GradAccumulationCell(network, 3) if accumulate else network
        step = mindspore.amp.build_train_network(cell, optimizer, level=level, loss_scale_manager=None)
        for batch in batches("labels", RAGGED):
            step(*map(Tensor, batch))
        finals.append(np.concatenate([as_numpy(one).ravel() for one in backbone.trainable_params()]))
    assert relative_error(finals[1], finals[0]) < (TOLERANCE if level == "O0" else 5e-3)
    exact = run("labels", micro_size=3, optimizer=lambda parameters: nn.SGD(parameters, 0.05)).state
    exact = np.concatenate([exact[one.name].ravel() for one in backbone.trainable_params()])
    assert (relative_error(finals[1], exact) > 1e-6) == (level != "O0")


# -- Model.train, callbacks, checkpoints, audit ------------------------------------------------------------------------


def data_set():
    x, text = batches("towers", 38, 1)[0]
    return ms.dataset.NumpySlicesDataset((x, text), ["x", "text"], shuffle=False).batch(16)  # 16 + 16 + 6


def fit(wrap, callbacks=(), epochs=3):
    backbone, loss_fn = make_parts("towers")
    network = wrap(backbone, loss_fn)
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    model = ms.Model(network, optimizer=optimizer)
    model.train(epochs, data_set(), callbacks=list(callbacks))
    return model, {one.name: as_numpy(one) for one in [*network.get_parameters(), *optimizer.get_parameters()]}


def in_cell(backbone, loss_fn):
    return GradAccumulationCell(WithBatchLossCell(backbone, loss_fn), 4)


@pytest.mark.core("graph")
def test_model_train_with_callbacks_equals_the_whole_batch(mode, tmp_path, capsys):
    _, reference = fit(Whole)
    file = tmp_path / "windows.jsonl"
    _, after = fit(in_cell, [train.LossMonitor(3), FlushAccumulation(), WindowMonitor(str(file))])
    assert max(relative_error(after[name], reference[name]) for name in reference) < TOLERANCE
    assert "loss is" in capsys.readouterr().out
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["update"] for row in rows] == list(range(1, 10))


@pytest.mark.thorough
def test_resume_goes_on_with_another_micro_size(tmp_path):
    _, reference = fit(in_cell, epochs=3)
    model, _ = fit(in_cell, [UpdateCheckpoint(3, directory=str(tmp_path))], epochs=1)
    (checkpoint,) = tmp_path.glob("*.ckpt")
    backbone, loss_fn = make_parts("towers")
    network = WithBatchLossCell(backbone, loss_fn)
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    model = ms.Model(GradAccumulationCell(network, 2), optimizer=optimizer)
    batches_of = data_set()
    finished = resume(model, str(checkpoint), batches_of)
    model.train(3, batches_of, initial_epoch=finished, dataset_sink_mode=False)
    assert int(model.train_network.update_count.asnumpy()) == 9
    for one in [*network.get_parameters(), *optimizer.get_parameters()]:
        assert relative_error(as_numpy(one), reference[one.name]) < TOLERANCE


def test_a_schedule_of_windows_is_refused_before_training():
    with pytest.raises(ValueError, match=r"'WithBatchLossCell', whose loss needs all samples of the window at once"):
        fit(in_cell, [AccumulationScheduler({0: 1, 1: 2})])
    backbone, loss_fn = make_parts("towers")
    step = accumulated(micro_size=2)(backbone, loss_fn, nn.SGD(backbone.trainable_params(), 0.1))
    with pytest.raises(ValueError, match=r"Use larger batches and a larger 'micro_size'"):
        step.set_accumulation_steps(2)
    assert not step.flush()


@pytest.mark.core("graph-towers")
@pytest.mark.parametrize("kind", ["towers", "labels"])
def test_audit_passes_and_leaves_no_trace(kind, mode):
    backbone, loss_fn = make_parts(kind)
    network = WithBatchLossCell(backbone, loss_fn)
    optimizer = nn.Adam(network.trainable_params(), 0.01)
    before = {one.name: as_numpy(one) for one in network.get_parameters()}
    report = audit(GradAccumulationCell(network, 3), optimizer, *map(Tensor, batches(kind, RAGGED, 1)[0]))
    assert report.ok, str(report)
    assert report.loss_behaves_as == "batch"
    assert "one of the whole batch, as WithBatchLossCell says" in str(report)
    assert not report.couples_samples
    assert max(report.gradients.values()) < TOLERANCE
    assert all((as_numpy(one) == before[one.name]).all() for one in network.get_parameters())


class Centred(Single):
    """Compares samples where only one micro-batch is seen."""

    def construct(self, x):
        values = self.tower(x)
        return values - values.mean(axis=0, keep_dims=True)


def test_audit_finds_a_backbone_that_couples_samples():
    network = WithBatchLossCell(Centred(), Spread())
    report = audit(
        GradAccumulationCell(network, 3),
        nn.SGD(network.trainable_params(), 0.1),
        *map(Tensor, batches("single", RAGGED, 1)[0]),
    )
    assert not report.ok
    assert report.couples_samples
    assert "another representation among other samples" in report.problems[0]


# -- layers that a second pass would upset -----------------------------------------------------------------------------


class WithLayer(nn.Cell):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.out = nn.Dense(12, 6)

    def construct(self, x):
        return self.out(self.layer(x))


def step_of(backbone, loss_fn, **options):
    return accumulated(**options)(backbone, loss_fn, nn.SGD(backbone.trainable_params(), 0.1)).set_train()


def test_batch_norm_draws_the_warning_that_says_twice():
    with pytest.warns(UserWarning, match="statistics are updated twice per micro-batch"):
        step_of(WithLayer(nn.BatchNorm1d(12)), Spread(), micro_size=3)


@pytest.mark.core(mode="graph")
def test_window_batch_norm_counts_once(mode):
    """Its moving statistics are the whole batch's, by MindSpore's own layer, unbiased variance and all."""
    x = Tensor(batches("single", RAGGED, 1)[0][0] * 2 + 1)
    plain = WithLayer(nn.BatchNorm1d(12))
    nn.TrainOneStepCell(Whole(plain, Spread()), nn.SGD(plain.trainable_params(), 0.1)).set_train()(x)
    windowed = WithLayer(WindowBatchNorm(12))
    step_of(windowed, Spread(), micro_size=3)(x)
    for name in ("moving_mean", "moving_variance"):
        moved = as_numpy(getattr(windowed.layer, name))
        assert relative_error(moved, as_numpy(getattr(plain.layer, name))) < 1e-6


class Dropped(nn.Cell):
    def __init__(self, layer):
        super().__init__()
        self.weight = ms.Parameter(Tensor(np.ones(1000), ms.float32), name="weight")
        self.layer = layer

    def construct(self, x):
        return self.layer(self.weight * x)


class HalfSquares(nn.Cell):
    def construct(self, values):
        return ops.square(values).sum() / 2


def kept_twice(samples, layer, **options):
    """Of half the squares of dropped weights, the gradient is the weight times the masks of both passes, each of which
    doubles what it keeps. How many of the weights are kept in both, of a thousand in each sample, in three updates: a
    half of them if the masks are the same, a quarter if not."""
    backbone = Dropped(layer)
    optimizer = nn.SGD(backbone.trainable_params(), 0.01)
    step = accumulated(micro_batch_size=2, **options)(backbone, HalfSquares(), optimizer).set_train()
    shares = []
    for _ in range(3):
        before = as_numpy(backbone.weight)
        step(Tensor(np.ones((samples, 1000)), ms.float32))
        shares.append(((before - as_numpy(backbone.weight)) / 0.01 / before / 4 / samples).mean())
    return shares


@pytest.mark.parametrize(("way", "seeded"), [("pynative", True), ("graph", False), ("jit", False)])
def test_dropout_draws_other_masks_and_a_warning(way, seeded, monkeypatch):
    ms.set_context(mode=WAYS[way])
    ms.set_seed(3)
    if not seeded:
        monkeypatch.setattr(sys.modules["mindspore.common.seed"], "_GLOBAL_SEED", None)
    layer = nn.Dropout(p=0.5)
    with pytest.warns(UserWarning, match=r"1 Dropout layer\(s\) \(layer\) that draw other masks when") as caught:
        shares = kept_twice(8, layer, jit=way == "jit")
    assert shares == pytest.approx([0.25] * 3, abs=0.04)
    assert len(caught) == 1


def test_dropout_without_a_second_pass_or_a_rate_draws_no_warning(pynative):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_of(WithLayer(nn.Dropout(p=0.5)), Spread(), micro_size=1)
        step_of(WithLayer(nn.Dropout(p=0.0)), Spread(), micro_size=3)


# -- compilation, memory -----------------------------------------------------------------------------------------------


def program(*arguments, folder=None, **variables):
    """What batch_loss_program.py prints, in a process of its own."""
    result = subprocess.run(
        [sys.executable, str(paths.worker("batch_loss_program.py")), *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths.python_path(), **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.core("16-31-4")
@pytest.mark.parametrize(("micro_size", "samples", "count"), [(2, 32, 3), (16, 32, 3), (16, 31, 4)])
def test_the_graph_does_not_grow_with_micro_size(micro_size, samples, count, tmp_path):
    """Erf, which the backbone alone has, in the finished graph: once in each loop and once for the last micro-batch, in
    the first pass; in the second, where the last micro-batch is smaller."""
    program("graph", micro_size, samples, folder=tmp_path, MS_DEV_SAVE_GRAPHS="2", MS_DEV_SAVE_GRAPHS_PATH="ir")
    (graph,) = sorted(tmp_path.glob("ir/**/*_validate_*.ir"))[-1:]
    assert len(re.findall(r"= (?:PrimFunc_)?Erf\(", graph.read_text())) == count


def test_one_compilation_for_each_shape_of_batch():
    backbone, loss_fn = make_parts("towers")
    step = accumulated(micro_size=4)(backbone, loss_fn, nn.SGD(backbone.trainable_params(), 0.1)).set_train()
    for samples, compiled in ((16, 1), (16, 1), (6, 2), (16, 2), (6, 2)):
        step(*map(Tensor, batches("towers", samples, 1)[0]))
        assert len(step.compile_cache) == compiled


@pytest.mark.thorough
@pytest.mark.parametrize(("way", "samples"), [("graph", 256), ("graph", 250), ("pynative", 256)])
def test_the_activations_of_one_micro_batch_are_in_memory(way, samples):
    """Growth of the process's peak from before the first update, of which activations are nearly all. Graph mode gives
    the loop and the last micro-batch outside of it memory of their own."""
    whole_growth = float(program("memory", way, 1, samples))
    growth = float(program("memory", way, 16, samples))
    assert whole_growth > 500
    assert growth < 0.25 * whole_growth


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulation_steps": 2}, r"'accumulation_steps' must be 1, but got 2: .* use larger batches"),
        ({"micro_size": 2, "count": len}, r"'count' must be None, but got <built-in function len>"),
        ({"micro_size": 2, "loss_weights": (1.0, 2.0)}, r"'loss_weights' must be \(1.0,\), but got \(1.0, 2.0\)"),
        ({"micro_size": 2, "record_noise": True}, r"'record_noise' must be False, but got True: .*not an estimate"),
        ({"micro_size": 2, "overflow": "drop_micro_batch"}, r"'overflow' must be 'drop_window', but got 'drop_micro"),
    ],
)
def test_refuses_options_that_cannot_be_exact(options, message):
    network = WithBatchLossCell(*make_parts("towers"))
    with pytest.raises(ValueError, match=rf"^For 'GradAccumulationCell', with a network of class .* {message}"):
        GradAccumulationCell(network, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((abs, InfoNCE()), r"'backbone' must be a Cell, but got <built-in function abs>"),
        ((Towers(), abs), r"'loss_fn' must be a Cell, but got <built-in function abs>"),
    ],
)
def test_refuses_what_is_no_cell(arguments, message):
    with pytest.raises(TypeError, match=message):
        WithBatchLossCell(*arguments)


def test_refuses_gather_ranks_that_is_no_bool():
    with pytest.raises(TypeError, match=r"'gather_ranks' must be a bool, but got 1"):
        WithBatchLossCell(Towers(), InfoNCE(), gather_ranks=1)


class Returns(Single):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def construct(self, x):
        values = self.tower(x)
        if self.kind == "mean":
            return values, values.mean(axis=0)
        if self.kind == "scalar":
            return values.mean()
        if self.kind == "ints":
            return values.astype(ms.int32)
        return (values,) * 17


@pytest.mark.core(mode="graph")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("mean", r"one entry for each sample along axis 0, but got shapes \[\(., 6\), \(6,\)\]"),
        ("scalar", r"one entry for each sample along axis 0, but got shapes \[\(\)\]"),
        ("ints", r"at least one representation of a float dtype"),
        ("many", r"at most 16 representations, but got 17"),
    ],
)
def test_refuses_representations_that_are_none(kind, message, mode):
    backbone = Returns(kind)
    before = as_numpy(backbone.tower.weight)
    with pytest.raises(ValueError, match=message):
        step_of(backbone, Spread(), micro_size=3)(*map(Tensor, batches("single", RAGGED, 1)[0]))
    np.testing.assert_array_equal(as_numpy(backbone.tower.weight), before)


class PerSample(nn.Cell):
    def construct(self, values):
        return ops.square(values).sum(axis=1)


def test_refuses_a_loss_that_is_no_scalar():  # in PyNative mode MindSpore trains no more after such an error
    with pytest.raises(ValueError, match=r"the network must return a scalar loss of shape \(\), but got shape \(13,\)"):
        step_of(Single(), PerSample(), micro_size=3)(*map(Tensor, batches("single", RAGGED, 1)[0]))


@pytest.mark.core(mode="graph")
def test_gather_ranks_changes_nothing_stand_alone(mode):
    assert_equivalent(run(way=mode, micro_size=3, gather_ranks=True), whole_batch("towers", RAGGED), TOLERANCE)


@pytest.mark.core(mode="graph")
def test_a_batch_that_fails_leaves_nothing_behind(mode):
    """A batch whose second input is too wide fails; what comes next is as if it had not been."""
    reference = whole_batch("towers", RAGGED)
    backbone, loss_fn = make_parts("towers")
    parameters = [*backbone.trainable_params(), *loss_fn.trainable_params()]
    step = accumulated(micro_size=3)(backbone, loss_fn, nn.SGD(parameters, 0.2)).set_train()
    losses = []
    for x, text in batches("towers", RAGGED)[:2]:
        with pytest.raises((ValueError, RuntimeError)):
            step(Tensor(x), Tensor(np.concatenate((text, text), axis=1)))
        losses.append(float(step(Tensor(x), Tensor(text))))
    assert relative_error(np.array(losses), reference.losses[:2]) < TOLERANCE
