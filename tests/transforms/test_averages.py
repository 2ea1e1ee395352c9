"""Averages instead of weights in evaluations and exports, and transforms in checkpoints."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.train import MAE, Callback

from gaccum_ms import GradAccumulationCell, SkipSpikes, WeightAverage, resume
from gaccum_ms.backend.parameters import own
from tests.support.reference import FEATURES, as_numpy
from tests.support.state import assert_identical, everything

X = np.random.default_rng(3).normal(size=(24, FEATURES)).astype(np.float32)
Y = (X[:, :1] - X[:, 1:2]).astype(np.float32)
BATCHES = [(X[at : at + 6], Y[at : at + 6]) for at in range(0, 24, 6)]


def data_set():
    return ms.dataset.NumpySlicesDataset((X, Y), shuffle=False).batch(6)


def make_model(*transforms):
    net = nn.Dense(FEATURES, 1, weight_init="ones", bias_init="zeros")
    cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), 2, transforms=transforms)
    optimizer = nn.Momentum(net.trainable_params(), 0.05, 0.9)
    evaluated = nn.WithEvalCell(net, nn.MSELoss())
    model = ms.Model(cell, optimizer=optimizer, eval_network=evaluated, eval_indexes=[0, 1, 2], metrics={"mae": MAE()})
    return model, net


def train(step, batches):
    for batch in batches:
        step(*map(Tensor, batch))


def error_of(weight, bias):
    return float(np.abs(X @ weight.T + bias - Y).mean())


# -- averages in the place of weights ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    """A model, its network, and the averages that it should be evaluated with."""
    model, net = make_model(average := WeightAverage(0.5))
    train(model.train_network, BATCHES[:3])
    return model, net, [as_numpy(one) for one in average.averages]


def test_evaluations_and_exports_see_them_and_the_weights_come_back(trained, tmp_path):
    model, net, averages = trained
    step = model.train_network
    before = everything(step)
    own_error = model.eval(data_set())["mae"]
    with step.averaged_weights():
        error = model.eval(data_set())["mae"]
        with step.averaged_weights():  # nested: no effect
            np.testing.assert_array_equal(as_numpy(net.weight), averages[0])
        np.testing.assert_array_equal(as_numpy(net.weight), averages[0])
        ms.export(net, Tensor(X), file_name=str(tmp_path / "net"), file_format="MINDIR")
    outputs = nn.GraphCell(ms.load(str(tmp_path / "net.mindir")))(Tensor(X)).asnumpy()
    np.testing.assert_allclose(outputs, X @ averages[0].T + averages[1], rtol=1e-4, atol=1e-5)
    assert error == pytest.approx(error_of(*averages), rel=1e-5)
    assert own_error == pytest.approx(error_of(as_numpy(net.weight), as_numpy(net.bias)), rel=1e-5)
    assert abs(error - own_error) > 1e-3
    assert_identical(before, everything(step))


def test_weights_come_back_whatever_is_raised(trained):
    model, net, averages = trained
    before = as_numpy(net.weight)
    with pytest.raises(KeyboardInterrupt), model.train_network.averaged_weights():
        np.testing.assert_array_equal(as_numpy(net.weight), averages[0])
        raise KeyboardInterrupt
    np.testing.assert_array_equal(as_numpy(net.weight), before)


def test_averages_that_were_written_before_the_first_update_stay(tmp_path, pynative):
    """Also zeros; those that were not written are the weights before the first update."""
    model, net = make_model(average := WeightAverage(0.5))
    average.averages[1].set_data(Tensor([0.0], ms.float32))
    net.bias.set_data(Tensor([0.75], ms.float32))
    file = str(tmp_path / "written.ckpt")
    ms.save_checkpoint(model.train_network, file)
    model, net = make_model(average := WeightAverage(0.5))
    step = model.train_network
    ms.load_checkpoint(file, step)
    weight = as_numpy(net.weight)
    with step.averaged_weights():
        assert float(net.bias.asnumpy()[0]) == 0.0
        np.testing.assert_array_equal(as_numpy(net.weight), weight)
    assert float(net.bias.asnumpy()[0]) == 0.75
    train(step, BATCHES[:1])
    for one, before, moved in zip(net.trainable_params(), (weight, 0.0), average.averages, strict=True):
        np.testing.assert_allclose(as_numpy(moved), (before + as_numpy(one)) / 2, rtol=1e-5)


def test_before_the_first_update_they_are_the_weights_and_nothing_trains_within_at_any_time(pynative):
    step = make_model(WeightAverage(0.5))[0].train_network
    for is_first in (True, False):
        before = everything(step)
        words = "there must be no training within 'averaged_weights"
        with pytest.raises(RuntimeError, match=words), step.averaged_weights():
            assert (as_numpy(step.weights[0]) == before["weight"]).all() == is_first
            train(step, BATCHES[:1])
        assert_identical(before, everything(step))
        train(step, BATCHES[:1])


class Watch(Callback):
    """Notes the weights when an evaluation begins and ends, and when an epoch begins."""

    def __init__(self, net, fails=False):
        super().__init__()
        self.net, self.fails = net, fails
        self.begins, self.ends, self.epochs, self.errors = [], [], [], []

    def on_eval_begin(self, run_context):
        self.begins.append(as_numpy(self.net.weight))
        if self.fails:
            raise OSError("in evaluation")

    def on_eval_end(self, run_context):
        self.ends.append(as_numpy(self.net.weight))
        self.errors.append(run_context.original_args().metrics["mae"])

    def on_train_epoch_begin(self, run_context):
        self.epochs.append(as_numpy(self.net.weight))


def test_the_evaluations_of_fit_see_them(pynative):
    model, net = make_model(average := WeightAverage(0.5))
    watch = Watch(net)
    model.fit(2, data_set(), data_set(), callbacks=[watch])
    plain, other = make_model()
    plain.train(1, data_set())
    assert len(watch.errors) == 2
    np.testing.assert_array_equal(watch.epochs[1], as_numpy(other.weight))  # training went on with the weights
    averages = [as_numpy(one) for one in average.averages]
    np.testing.assert_array_equal(watch.begins[1], averages[0])
    np.testing.assert_array_equal(watch.ends[1], averages[0])
    assert watch.errors[1] == pytest.approx(error_of(*averages), rel=1e-5)
    assert np.abs(as_numpy(net.weight) - averages[0]).max() > 1e-3


def test_an_evaluation_of_fit_that_fails_gives_the_weights_back(pynative):
    model, net = make_model(average := WeightAverage(0.5))
    watch = Watch(net, fails=True)
    with pytest.raises(OSError, match="in evaluation"):
        model.fit(2, data_set(), data_set(), callbacks=[watch])
    np.testing.assert_array_equal(watch.begins[0], as_numpy(average.averages[0]))
    assert np.abs(as_numpy(net.weight) - watch.begins[0]).max() > 1e-3
    train(model.train_network, BATCHES[:1])


# -- checkpoints -------------------------------------------------------------------------------------------------------


def links():
    return SkipSpikes(3.0, history=3, warmup_updates=2), WeightAverage(0.5, warmup=True)


SPIKY = [*BATCHES[:3], (X[:6], Y[:6] * 1000), *BATCHES, (X[6:12], Y[6:12] * 1000), BATCHES[0]]


def test_a_training_goes_on_with_all_of_their_state(tmp_path, pynative):
    """Loaded into a step that has run: median, counts and averages equal those of an uninterrupted training."""
    step, other = (make_model(*links())[0].train_network for _ in range(2))
    train(step, SPIKY[:5])
    file = str(tmp_path / "step.ckpt")
    ms.save_checkpoint(step, file)
    train(step, SPIKY[5:])
    assert int(step.skipped_updates.asnumpy()) == 2
    train(other, BATCHES[2:])
    resume(other, file)
    assert int(other.skipped_updates.asnumpy()) == 1
    train(other, SPIKY[5:])
    assert_identical(everything(step), everything(other), but={own("random_state")})


def test_a_checkpoint_without_them_lets_them_begin_anew(tmp_path, pynative):
    """They begin with the loaded weights, not with the earlier ones."""
    plain, _ = make_model()
    train(plain.train_network, BATCHES[:2])
    file = str(tmp_path / "plain.ckpt")
    ms.save_checkpoint(plain.train_network, file)
    spikes, average = links()
    step = make_model(spikes, average)[0].train_network
    train(step, [*BATCHES[1:], (X[:6], Y[:6] * 1000)])
    assert int(step.skipped_updates.asnumpy()) == 1
    resume(step, file)
    assert int(step.skipped_updates.asnumpy()) == int(average.averaged_updates.asnumpy()) == 0
    assert np.isinf(spikes.judged_norms.asnumpy()).all()
    loaded = as_numpy(step.weights[0])
    train(step, BATCHES[:1])
    expected = loaded * (2 / 11) + as_numpy(step.weights[0]) * (9 / 11)
    np.testing.assert_allclose(as_numpy(average.averages[0]), expected, rtol=1e-5)
