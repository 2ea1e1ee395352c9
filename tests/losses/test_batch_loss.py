"""WithBatchLossCell: a loss of the whole batch, trained with micro-batches, equals training on the whole batch. Ranks:
test_batch_loss_ranks.py."""

from __future__ import annotations

import functools
import warnings

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from gaccum_ms import (
    AccumulationScheduler,
    Accumulators,
    GradAccumulationCell,
    WindowBatchNorm,
    WithBatchLossCell,
    audit,
)
from tests.losses import batch_loss_program
from tests.support import contrastive
from tests.support.alone import alone
from tests.support.contrastive import InfoNCE, Single, Spread, Towers, Whole, accumulated, batches, make_parts, whole
from tests.support.modes import eagerly
from tests.support.reference import as_numpy, assert_equivalent, relative_error

RAGGED, UPDATES = 13, 3
TOLERANCE = 1e-5


@functools.cache
@eagerly()
def whole_batch(kind: str):
    """MindSpore's own step on whole batches."""
    return contrastive.train(whole, kind, batches(kind, RAGGED, UPDATES))


SCALE = Tensor(1024.0, ms.float32)
TOGETHER = {"reduction": "sum", "accumulators": Accumulators(ms.float16, compensated=True), "scale_sense": SCALE}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("towers", {"micro_size": 3}),
        ("labels", {"micro_size": 3}),
        ("towers", {"micro_size": 1}),
        ("single", {"micro_batch_size": 5, **TOGETHER}),
    ],
)
def test_equals_the_whole_batch(kind, options, pynative):
    """In graph mode: `test_a_network_that_adds_in_place...` below, and ranks/test_batch_loss_ranks.py."""
    run = contrastive.train(accumulated(**options), kind, batches(kind, RAGGED, UPDATES))
    assert_equivalent(run, whole_batch(kind), TOLERANCE)


def test_called_by_itself_it_is_the_whole_batchs_network(pynative):
    backbone, loss_fn = make_parts("labels")
    batch = [Tensor(value) for value in batches("labels", RAGGED, 1)[0]]
    expected = float(Whole(backbone, loss_fn)(*batch))
    network = WithBatchLossCell(backbone, loss_fn)
    assert float(network(*batch)) == pytest.approx(expected, rel=1e-6)
    assert float(GradAccumulationCell(network, 4)(*batch)) == pytest.approx(expected, rel=1e-6)


# -- schedules and audit -----------------------------------------------------------------------------------------------


def step_of(backbone, loss_fn, **options):
    return accumulated(**options)(backbone, loss_fn, nn.SGD(backbone.trainable_params(), 0.1)).set_train()


def test_a_schedule_of_windows_is_refused_before_training():
    step = step_of(*make_parts("single"), micro_size=2)
    data = ms.dataset.NumpySlicesDataset(batches("single", RAGGED, 1)[0], ["x"]).batch(RAGGED)
    with pytest.raises(ValueError, match=r"'WithBatchLossCell' has one loss, .* got accumulation_steps=2. Leave"):
        ms.Model(step).train(2, data, callbacks=[AccumulationScheduler({0: 1, 1: 2})])
    with pytest.raises(ValueError, match=r"Use larger batches and a larger 'micro_size'"):
        step.set_accumulation_steps(2)
    assert not step.flush()


class Centred(Single):
    """Compares samples in the backbone, which sees only one micro-batch."""

    def construct(self, x):
        values = self.tower(x)
        return values - values.mean(axis=0, keep_dims=True)


def test_audit_finds_a_backbone_that_couples_samples(pynative):
    for backbone, couples in ((Single(), False), (Centred(), True)):
        network = WithBatchLossCell(backbone, Spread())
        optimizer = nn.SGD(network.trainable_params(), 0.1)
        report = audit(GradAccumulationCell(network, 3), optimizer, Tensor(batches("single", RAGGED, 1)[0][0]))
        assert report.couples_samples is couples is not report.ok, str(report)
        assert ("another representation among other samples" in str(report)) is couples
        assert report.loss_behaves_as == "batch"


# -- layers that a second pass would upset -----------------------------------------------------------------------------


class WithLayer(nn.Cell):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.out = nn.Dense(12, 6)

    def construct(self, x):
        return self.out(self.layer(x))


def test_layers_that_a_second_pass_upsets_draw_a_warning(pynative):
    x = Tensor(batches("single", RAGGED, 1)[0][0])
    with pytest.warns(UserWarning, match="statistics are updated twice per micro-batch"):
        step_of(WithLayer(nn.BatchNorm1d(12)), Spread(), micro_size=3)(x)
    with pytest.warns(UserWarning, match=r"1 Dropout layer\(s\) \(layer\) that draw other masks when"):
        step_of(WithLayer(nn.Dropout(p=0.5)), Spread(), micro_size=3)(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_of(WithLayer(nn.Dropout(p=0.5)), Spread(), micro_size=1)(x)
        step_of(WithLayer(nn.Dropout(p=0.0)), Spread(), micro_size=3)(x)


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


# -- in a process of its own -------------------------------------------------------------------------------------------


def test_a_network_that_adds_in_place_where_a_tensor_is_indexed():
    """As a plain call, the first pass made MindSpore lose a Parameter: "Illegal AnfNode for evaluating"."""
    assert alone(batch_loss_program.update_residual, RAGGED) < TOLERANCE


def test_the_activations_of_one_micro_batch_are_in_memory():
    """The growth of the process's peak since before the first update, nearly all of it activations. The loop and the
    last micro-batch outside of it have separate memory. Fewer samples would be lost in what the framework takes."""
    whole_growth = alone(batch_loss_program.growth, 1, 250)
    assert whole_growth > 500
    assert alone(batch_loss_program.growth, 16, 250) < 0.25 * whole_growth


# -- errors ------------------------------------------------------------------------------------------------------------


def test_refuses_what_is_no_cell_and_no_bool():
    with pytest.raises(TypeError, match=r"'backbone' must be a Cell, but got <built-in function abs>"):
        WithBatchLossCell(abs, InfoNCE())
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
        (lambda values: (values,) * 17, r"at most 16 representations, but got 17"),
    ],
    ids=["mean", "scalar", "many"],
)
def test_refuses_representations_that_are_none(made, message, pynative):
    backbone = Returns(made)
    before = as_numpy(backbone.tower.weight)
    with pytest.raises(ValueError, match=message):
        step_of(backbone, Spread(), micro_size=3)(*map(Tensor, batches("single", RAGGED, 1)[0]))
    np.testing.assert_array_equal(as_numpy(backbone.tower.weight), before)


def test_refuses_a_loss_that_is_no_scalar():  # in PyNative mode MindSpore cannot train after such an error
    with pytest.raises(ValueError, match=r"the network must return a scalar loss of shape \(\), but got shape \(13, 6"):
        step_of(Single(), nn.ReLU(), micro_size=3)(*map(Tensor, batches("single", RAGGED, 1)[0]))


def test_a_batch_that_fails_leaves_nothing_behind(pynative):
    """A batch whose second input is too wide fails; the next batches train as without it. In stand-alone mode
    `gather_ranks` changes nothing."""
    reference = whole_batch("towers")
    backbone, loss_fn = make_parts("towers")
    parameters = [*backbone.trainable_params(), *loss_fn.trainable_params()]
    step = accumulated(micro_size=3, gather_ranks=True)(backbone, loss_fn, nn.SGD(parameters, 0.2)).set_train()
    losses = []
    for x, text in batches("towers", RAGGED)[:2]:
        with pytest.raises((ValueError, RuntimeError)):
            step(Tensor(x), Tensor(np.concatenate((text, text), axis=1)))
        losses.append(float(step(Tensor(x), Tensor(text))))
    assert relative_error(np.array(losses), reference.losses[:2]) < TOLERANCE
