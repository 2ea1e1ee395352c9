"""WithBatchLossCell: a loss of the whole batch, trained with micro-batches, equals training on the whole batch. Ranks:
test_batch_loss_ranks.py."""

from __future__ import annotations

import functools
import json
import sys
import warnings

import mindspore as ms
import mindspore.amp
import numpy as np
import pytest
from mindspore import Tensor, nn, ops, train

from gaccum_ms import (
    AccumulationScheduler,
    Accumulators,
    FlushAccumulation,
    GradAccumulationCell,
    WindowBatchNorm,
    WindowMonitor,
    WithBatchLossCell,
    audit,
)
from tests.support import contrastive, paths
from tests.support.contrastive import (
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
from tests.support.modes import eagerly
from tests.support.programs import Programs
from tests.support.reference import (
    OPTIMIZERS,
    as_numpy,
    assert_equivalent,
    make_step,
    relative_error,
    vector,
)
from tests.support.state import manager

DIVISIBLE, RAGGED = 24, 13
UPDATES = 3
TOLERANCE = 1e-5
WAYS = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE, "jit": ms.PYNATIVE_MODE}


@eagerly()
def train_whole(kind, data, make_step=whole, optimizer=None):
    """MindSpore's own step on whole batches."""
    return contrastive.train(make_step, kind, data, optimizer)


@functools.cache
def whole_batch(kind: str, samples: int):
    return train_whole(kind, batches(kind, samples, UPDATES))


@functools.cache
def run(kind="towers", samples=RAGGED, way="graph", optimizer=None, **options):
    ms.set_context(mode=WAYS[way])
    jit = {"jit": True} if way == "jit" else {}
    return contrastive.train(accumulated(**options, **jit), kind, batches(kind, samples, UPDATES), optimizer)


# -- equal to the whole batch ------------------------------------------------------------------------------------------


@pytest.mark.core("towers-3-13-pynative", "labels-3-13-pynative", "single-3-13-jit", "single-1-13-pynative")
@pytest.mark.parametrize(
    ("kind", "micro_size", "samples", "way"),
    [
        ("towers", 3, RAGGED, "pynative"),
        ("towers", 3, RAGGED, "graph"),
        ("labels", 3, RAGGED, "pynative"),
        ("single", 3, RAGGED, "jit"),
        ("single", 1, RAGGED, "pynative"),
        ("labels", 8, DIVISIBLE, "graph"),
    ],
)
def test_equals_the_whole_batch(kind, micro_size, samples, way):
    reference = whole_batch(kind, samples)
    assert_equivalent(run(kind, samples, way, micro_size=micro_size), reference, TOLERANCE)


SCALE = Tensor(1024.0, ms.float32)
TOGETHER = {"reduction": "sum", "accumulators": Accumulators(ms.float16, compensated=True), "scale_sense": SCALE}


@pytest.mark.parametrize("options", [{"micro_size": 3, **TOGETHER}, {"micro_batch_size": 5}], ids=["together", "size"])
def test_options_of_the_cell_change_nothing(options):
    assert_equivalent(run("single", way="pynative", **options), whole_batch("single", RAGGED), TOLERANCE)


class Clipped(nn.Cell):
    """Clips by hand: MindSpore's function gives a scalar's gradient the shape (1,), which its SGD does not accept."""

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


def test_clips_the_finished_gradient():
    reference = train_whole("single", batches("single", RAGGED, UPDATES), clipped_whole)
    assert_equivalent(run("single", way="pynative", micro_size=3, max_grad_norm=0.05), reference, TOLERANCE)
    with pytest.raises(AssertionError):  # the clip has an effect
        assert_equivalent(whole_batch("single", RAGGED), reference, TOLERANCE)


def test_weights_that_backbone_and_loss_share_and_frozen_ones(pynative):
    class Shared(nn.Cell):
        def __init__(self, dense):
            super().__init__()
            self.dense = dense

        def construct(self, values):
            return ops.square(values @ self.dense.weight).sum() + ops.square(values.T @ values).mean()

    runs = []
    for micro_size in (3, None):
        backbone, _ = make_parts("single")
        backbone.tower.bias.requires_grad = False
        loss_fn = Shared(backbone.tower)
        optimizer = nn.SGD(backbone.trainable_params(), 0.001)
        step = accumulated(micro_size=micro_size) if micro_size else whole
        step = step(backbone, loss_fn, optimizer).set_train()
        runs.append([float(step(*map(Tensor, batch))) for batch in batches("single", RAGGED, UPDATES)])
        runs.append(as_numpy(backbone.tower.weight))
    assert relative_error(np.array(runs[0]), np.array(runs[2])) < TOLERANCE
    assert relative_error(runs[1], runs[3]) < TOLERANCE


def test_called_by_itself_it_is_the_whole_batchs_network(pynative):
    backbone, loss_fn = make_parts("labels")
    batch = [Tensor(value) for value in batches("labels", RAGGED, 1)[0]]
    expected = float(Whole(backbone, loss_fn)(*batch))
    network = WithBatchLossCell(backbone, loss_fn)
    assert float(network(*batch)) == pytest.approx(expected, rel=1e-6)
    assert float(GradAccumulationCell(network, 4)(*batch)) == pytest.approx(expected, rel=1e-6)


# -- loss scale, overflow ----------------------------------------------------------------------------------------------


def test_an_overflow_changes_nothing_and_lowers_the_scale(pynative):
    network = WithBatchLossCell(*make_parts("single"))
    step = make_step(network, OPTIMIZERS["momentum"], manager(), micro_size=3)
    trained = [*network.get_parameters(), *step.optimizer.get_parameters()]
    good, bad = batches("single", RAGGED, 2)
    bad[0][7, 0] = np.inf
    assert not step(*map(Tensor, good))[1]
    before = {parameter.name: as_numpy(parameter) for parameter in trained}
    _, overflow, scale = step(*map(Tensor, bad))
    assert overflow
    assert float(scale) == 1024
    for parameter in trained:
        np.testing.assert_array_equal(as_numpy(parameter), before[parameter.name])
    loss, overflow, scale = step(*map(Tensor, good))
    assert np.isfinite(float(loss)) and not overflow and float(scale) == 512


# -- Model.train, callbacks, checkpoints, audit ------------------------------------------------------------------------


def data_set():
    return ms.dataset.NumpySlicesDataset(batches("single", 3 * RAGGED, 1)[0], ["x"], shuffle=False).batch(RAGGED)


def fit(wrap, callbacks=()):
    backbone, loss_fn = make_parts("single")
    backbone.tower.bias.requires_grad = False  # a covariance does not depend on it: its moments are rounding errors
    network = wrap(backbone, loss_fn)
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    ms.Model(network, optimizer=optimizer).train(2, data_set(), callbacks=list(callbacks))
    return {one.name: as_numpy(one) for one in [*network.get_parameters(), *optimizer.get_parameters()]}


def in_cell(backbone, loss_fn):
    return GradAccumulationCell(WithBatchLossCell(backbone, loss_fn), 3)


def test_model_train_with_callbacks_equals_the_whole_batch(tmp_path, capsys, pynative):
    reference = fit(Whole)
    file = tmp_path / "windows.jsonl"
    after = fit(in_cell, [train.LossMonitor(3), FlushAccumulation(), WindowMonitor(str(file))])
    assert max(relative_error(after[name], reference[name]) for name in reference) < TOLERANCE
    assert "loss is" in capsys.readouterr().out
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["update"] for row in rows] == list(range(1, 7))


def test_a_schedule_of_windows_is_refused_before_training():
    with pytest.raises(ValueError, match=r"'WithBatchLossCell', whose loss needs all samples of the window at once"):
        fit(in_cell, [AccumulationScheduler({0: 1, 1: 2})])
    backbone, loss_fn = make_parts("towers")
    step = accumulated(micro_size=2)(backbone, loss_fn, nn.SGD(backbone.trainable_params(), 0.1))
    with pytest.raises(ValueError, match=r"Use larger batches and a larger 'micro_size'"):
        step.set_accumulation_steps(2)
    assert not step.flush()


def test_audit_passes_and_leaves_no_trace(pynative):
    network = WithBatchLossCell(*make_parts("towers"))
    optimizer = nn.Adam(network.trainable_params(), 0.01)
    before = {one.name: as_numpy(one) for one in network.get_parameters()}
    report = audit(GradAccumulationCell(network, 3), optimizer, *map(Tensor, batches("towers", RAGGED, 1)[0]))
    assert report.ok, str(report)
    assert report.loss_behaves_as == "batch"
    assert "one of the whole batch, as WithBatchLossCell says" in str(report)
    assert not report.couples_samples
    assert max(report.gradients.values()) < TOLERANCE
    assert all((as_numpy(one) == before[one.name]).all() for one in network.get_parameters())


class Centred(Single):
    """Compares samples in the backbone, which sees only one micro-batch."""

    def construct(self, x):
        values = self.tower(x)
        return values - values.mean(axis=0, keep_dims=True)


def test_audit_finds_a_backbone_that_couples_samples(pynative):
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


def test_batch_norm_draws_the_warning_that_says_twice(pynative):
    with pytest.warns(UserWarning, match="statistics are updated twice per micro-batch"):
        step_of(WithLayer(nn.BatchNorm1d(12)), Spread(), micro_size=3)(Tensor(batches("single", RAGGED, 1)[0][0]))


def test_window_batch_norm_counts_once(pynative):
    """Its moving statistics equal those of MindSpore's own layer on the whole batch, unbiased variance included."""
    x = Tensor(batches("single", RAGGED, 1)[0][0] * 2 + 1)
    windowed = WithLayer(WindowBatchNorm(12))
    step_of(windowed, Spread(), micro_size=3)(x)
    plain = WithLayer(nn.BatchNorm1d(12))
    nn.TrainOneStepCell(Whole(plain, Spread()), nn.SGD(plain.trainable_params(), 0.1)).set_train()(x)
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


def left_twice(samples, layer):
    """The share of the 1,000 weights that both passes leave in, in each of three updates: a half if the masks are the
    same, a quarter if not. The gradient of half the squares of the dropped weights is the weight times the masks of
    both passes; each mask doubles what it leaves in."""
    backbone = Dropped(layer)
    optimizer = nn.SGD(backbone.trainable_params(), 0.01)
    step = accumulated(micro_batch_size=2)(backbone, HalfSquares(), optimizer).set_train()
    shares = []
    for _ in range(3):
        before = as_numpy(backbone.weight)
        step(Tensor(np.ones((samples, 1000)), ms.float32))
        shares.append(((before - as_numpy(backbone.weight)) / 0.01 / before / 4 / samples).mean())
    return shares


@pytest.mark.core(mode="pynative")
@pytest.mark.parametrize(("mode", "seeded"), [("pynative", True), ("graph", False)], indirect=["mode"])
def test_dropout_draws_other_masks_and_a_warning(mode, seeded, monkeypatch):
    ms.set_seed(3)
    if not seeded:
        monkeypatch.setattr(sys.modules["mindspore.common.seed"], "_GLOBAL_SEED", None)
    layer = nn.Dropout(p=0.5)
    with pytest.warns(UserWarning, match=r"1 Dropout layer\(s\) \(layer\) that draw other masks when") as caught:
        shares = left_twice(8, layer)
    assert shares == pytest.approx([0.25] * 3, abs=0.04)
    assert len(caught) == 1


def test_dropout_without_a_second_pass_or_a_rate_draws_no_warning(pynative):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_of(WithLayer(nn.Dropout(p=0.5)), Spread(), micro_size=1)
        step_of(WithLayer(nn.Dropout(p=0.0)), Spread(), micro_size=3)


# -- in a process of its own -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A function that returns what batch_loss_program.py prints, in a separate process."""

    def printed(*arguments):
        folder = tmp_path_factory.mktemp("program")
        script = paths.worker("batch_loss_program.py")
        result = programs.run(script, *map(str, arguments), folder=folder, MS_DEV_HOST_BLOCKING_RUN="1")
        assert result.returncode == 0, result.stderr[-3000:]
        assert "eliminated by mistake" not in result.stderr, "MindSpore's warning of items that are named but not used"
        return result.stdout

    with Programs(paths.python_path()) as programs:
        yield printed


@pytest.mark.thorough
def test_a_network_that_adds_in_place_where_a_tensor_is_indexed(program):
    """MindSpore's compiler then keeps functions that it otherwise folds away. As a plain call, the first pass made it
    lose a Parameter: "Illegal AnfNode for evaluating"."""
    assert float(program("residual", RAGGED)) < TOLERANCE


def test_the_activations_of_one_micro_batch_are_in_memory(program):
    """The growth of the process's peak since before the first update, nearly all of it activations. The loop and the
    last micro-batch outside of it have separate memory. Fewer samples would be lost in what the framework takes."""
    whole_growth = float(program("memory", 1, 250))
    growth = float(program("memory", 16, 250))
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


def test_refuses_what_is_no_cell_and_no_bool():
    with pytest.raises(TypeError, match=r"'backbone' must be a Cell, but got <built-in function abs>"):
        WithBatchLossCell(abs, InfoNCE())
    with pytest.raises(TypeError, match=r"'loss_fn' must be a Cell, but got <built-in function abs>"):
        WithBatchLossCell(Towers(), abs)
    with pytest.raises(TypeError, match=r"'gather_ranks' must be a bool, but got 1"):
        WithBatchLossCell(Towers(), InfoNCE(), gather_ranks=1)


class Returns(Single):
    def __init__(self, made):
        super().__init__()
        self.made = made

    def construct(self, x):
        return self.made(self.tower(x))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda values: (values, values.mean(axis=0)), r"but output 1 got shape \(6,\) for . sample.* what is one"),
        (lambda values: values.mean(), r"of shape \(\) must be the same for all micro-batches"),
        (lambda values: values.astype(ms.int32), r"at least one representation of a float dtype"),
        (lambda values: (values,) * 17, r"at most 16 representations, but got 17"),
    ],
    ids=["mean", "scalar", "ints", "many"],
)
def test_refuses_representations_that_are_none(made, message, pynative):
    backbone = Returns(made)
    before = as_numpy(backbone.tower.weight)
    with pytest.raises(ValueError, match=message):
        step_of(backbone, Spread(), micro_size=3)(*map(Tensor, batches("single", RAGGED, 1)[0]))
    np.testing.assert_array_equal(as_numpy(backbone.tower.weight), before)


class WithTemperature(Single):
    """The representations, and a temperature as CLIP has it, which no sample changes."""

    def __init__(self):
        super().__init__()
        self.temperature = ms.Parameter(Tensor(0.7), name="temperature")

    def construct(self, x):
        return super().construct(x), ops.exp(self.temperature)


class Scaled(Spread):
    def construct(self, values, scale):
        return super().construct(values) * scale


def test_a_representation_of_shape_no_axis_is_shared(mode):
    results = []
    for micro_size in (3, 1):
        ms.set_seed(1)  # of the weights
        backbone = WithTemperature()
        step = step_of(backbone, Scaled(), micro_size=micro_size)
        losses = [float(step(*map(Tensor, batch))) for batch in batches("single", RAGGED, 2)]
        results.append(np.concatenate([losses, vector(step.weights)]))
    assert relative_error(*results) < 1e-5
    assert float(backbone.temperature) != np.float32(0.7), "the temperature is trained"


class PerSample(nn.Cell):
    def construct(self, values):
        return ops.square(values).sum(axis=1)


def test_refuses_a_loss_that_is_no_scalar():  # in PyNative mode MindSpore cannot train after such an error
    with pytest.raises(ValueError, match=r"the network must return a scalar loss of shape \(\), but got shape \(13,\)"):
        step_of(Single(), PerSample(), micro_size=3)(*map(Tensor, batches("single", RAGGED, 1)[0]))


def test_a_batch_that_fails_leaves_nothing_behind(pynative):
    """A batch whose second input is too wide fails; the next batches train as without it. In stand-alone mode
    `gather_ranks` changes nothing."""
    reference = whole_batch("towers", RAGGED)
    backbone, loss_fn = make_parts("towers")
    parameters = [*backbone.trainable_params(), *loss_fn.trainable_params()]
    step = accumulated(micro_size=3, gather_ranks=True)(backbone, loss_fn, nn.SGD(parameters, 0.2)).set_train()
    losses = []
    for x, text in batches("towers", RAGGED)[:2]:
        with pytest.raises((ValueError, RuntimeError)):
            step(Tensor(x), Tensor(np.concatenate((text, text), axis=1)))
        losses.append(float(step(Tensor(x), Tensor(text))))
    assert relative_error(np.array(losses), reference.losses[:2]) < TOLERANCE
