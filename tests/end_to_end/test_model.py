"""`ms.Model`, `build_train_network` and the callbacks work as without accumulation."""

from __future__ import annotations

import functools
import re

import mindspore as ms
import mindspore.amp
import mindspore.train
import numpy as np
import pytest
from mindspore import nn, ops, train
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import amp

from gaccum_ms import (
    CountNotIgnored,
    GradAccumulationCell,
    PerSampleLoss,
    TrainOneStepWithGradAccumulationCell,
    WithBatchLossCell,
)
from gaccum_ms.training.evaluation import parts_of
from tests.support.modes import eagerly
from tests.support.reference import OPTIMIZERS, Outer, as_numpy, batches, make_network, relative_error
from tests.support.state import assert_close, assert_identical, everything

BATCH, BATCHES, EPOCHS = 8, 3, 3
RAGGED = 6  # samples of a short batch, which 4 micro-batches cannot share equally


def data_set(last: int = BATCH):
    """The last batch of an epoch may be short."""
    samples = BATCH * (BATCHES - 1) + last
    return NumpySlicesDataset(batches(samples, 1)[0], ["x", "y"], shuffle=False).batch(BATCH)


def plain(loss_cell, optimizer):
    return ms.Model(loss_cell, optimizer=optimizer)


def by_model(loss_cell, optimizer):
    return ms.Model(GradAccumulationCell(loss_cell, 4), optimizer=optimizer)


def fit(make_model, callbacks=(), epochs=EPOCHS, last=BATCH):
    """Train, and return the weights and the optimizer's state."""
    network = make_network("dense")
    optimizer = OPTIMIZERS["momentum"](network.trainable_params())
    model = make_model(nn.WithLossCell(network, nn.CrossEntropyLoss()), optimizer)
    model.train(epochs, data_set(last), callbacks=list(callbacks))
    step = model.train_network
    return {p.name: as_numpy(p) for p in [*step.network.get_parameters(), *step.optimizer.get_parameters()]}


@pytest.mark.parametrize("build", [mindspore.amp.build_train_network, TrainOneStepWithGradAccumulationCell, None])
def test_every_way_in_equals_the_whole_batch(build, pynative):
    def make_model(loss_cell, optimizer):
        return (
            ms.Model(build(GradAccumulationCell(loss_cell, 4), optimizer)) if build else by_model(loss_cell, optimizer)
        )

    assert_close(fit(make_model, epochs=1, last=RAGGED), fit(plain, epochs=1, last=RAGGED))


def test_the_hook_is_where_mindspore_looks():
    assert amp.build_train_network is mindspore.amp.build_train_network is mindspore.train.build_train_network
    assert amp.build_train_network.__doc__ == amp.build_train_network.__wrapped__.__doc__


def test_other_networks_get_the_same_step_as_before():
    network = make_network("dense")
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    loss = nn.CrossEntropyLoss()
    assert type(ms.Model(network, loss, optimizer).train_network) is nn.TrainOneStepCell
    own = nn.GradAccumulationCell(nn.WithLossCell(network, loss), 2)
    assert type(mindspore.amp.build_train_network(own, optimizer)).__name__ == "_TrainGradAccuStepCell"


def test_the_original_taken_before_our_import_refuses_our_cell():
    cell = GradAccumulationCell(nn.WithLossCell(make_network("dense"), nn.CrossEntropyLoss()), 2)
    with pytest.raises(RuntimeError, match=r"'gaccum_ms.GradAccumulationCell' imported before build_train_network is"):
        amp.build_train_network.__wrapped__(cell, nn.SGD(cell.trainable_params(), 0.1))


def test_what_would_not_accumulate_is_refused_before_the_first_step(pynative):
    network = make_network("dense")
    loss = nn.CrossEntropyLoss()
    cell = GradAccumulationCell(nn.WithLossCell(network, loss), 2)
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    step = TrainOneStepWithGradAccumulationCell(cell, optimizer)
    weights = everything(network)
    with pytest.raises(ValueError, match=r"must be the outermost one .* but got 'Outer' around it"):
        ms.Model(Outer(cell), optimizer=optimizer)
    for holder, remedy in ((step, "step"), (Outer(step), "network")):
        with pytest.raises(ValueError, match=rf"built without an optimizer and a loss, .* Use ms\.Model\({remedy}\)"):
            ms.Model(holder, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"beside 'loss_fn' the network must return no loss .* 'WithLossCell' and"):
        ms.Model(cell, loss_fn=loss, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"'boost_level' must be 'O0', but got 'O1': .* Leave"):
        mindspore.amp.build_train_network(cell, optimizer, boost_level="O1")
    with pytest.raises(ValueError, match=r"with amp_level='O2' must have a cell of its own, .* already has a training"):
        ms.Model(cell, optimizer=optimizer, amp_level="O2")
    for model in (ms.Model(cell), ms.Model(Outer(cell)), ms.Model(cell, loss_fn=loss)):
        with pytest.raises(RuntimeError, match=r"the cell itself is being trained"):
            model.train(1, data_set())
    assert_identical(everything(network), weights)


def test_mindspores_callbacks_see_the_same(tmp_path, capsys):
    """LossMonitor and History see the losses, and TimeMonitor sees each epoch. ModelCheckpoint's files load into a
    network without accumulation. Ours is compiled."""
    seen = {}
    for make_model in (plain, by_model):
        folder, history = tmp_path / make_model.__name__, train.History()
        checkpoints = train.ModelCheckpoint("net", str(folder), train.CheckpointConfig(2, keep_checkpoint_max=20))
        ms.set_context(mode=ms.PYNATIVE_MODE if make_model is plain else ms.GRAPH_MODE)
        trained = fit(make_model, [train.LossMonitor(1), train.TimeMonitor(), history, checkpoints])
        printed = capsys.readouterr().out
        lines = re.findall(r"epoch: (\d+) step: (\d+), loss is ([\d.]+)", printed)
        assert [line[:2] for line in lines] == [(str(i), str(j)) for i in (1, 2, 3) for j in (1, 2, 3)]
        assert len(re.findall(r"Train epoch time: +[\d.]+ ms, per step time: +[\d.]+ ms", printed)) == EPOCHS
        of_epochs = np.array(history.history["net_output"]).ravel()
        losses = np.array([*(float(line[2]) for line in lines), *of_epochs])
        names = [f"net-{step}.ckpt" for step in ("1_2", "2_1", "2_3", "3_2", "3_3")]
        assert sorted(path.name for path in folder.glob("*.ckpt")) == names
        network = make_network("dense")
        assert not ms.load_param_into_net(network, ms.load_checkpoint(str(folder / "net-3_3.ckpt")))[0]
        weights = everything(network)
        assert_identical(weights, {name: trained[name] for name in weights})
        seen[make_model] = {"losses": losses, "epochs": np.array(history.epoch["epoch"]), **weights}
    assert_close(seen[by_model], seen[plain])


def network_alone(network, loss, optimizer, **options):
    return ms.Model(network, loss, optimizer, **options)


def with_loss_cell(network, loss, optimizer, **options):
    return ms.Model(GradAccumulationCell(nn.WithLossCell(network, loss), 4), optimizer=optimizer, **options)


def new_model(make_model, kind="dense", rate=0.5, **options):
    network = make_network(kind)
    metrics = {"loss": train.Loss(), "accuracy": train.Accuracy()}
    optimizer = nn.SGD(network.trainable_params(), rate)
    return network, make_model(network, nn.CrossEntropyLoss(), optimizer, metrics=metrics, **options)


def held_out():
    x, y = batches(BATCH * BATCHES, 1)[0]
    return NumpySlicesDataset((x, (y + 1) % 5), ["x", "y"], shuffle=False).batch(BATCH)


def test_at_each_level_the_given_network_predicts(pynative):
    """As without accumulation. O1 puts another network into a WithLossCell, and auto decorates the WithLossCell."""
    for level in ("O1", "auto"):
        for make_model in (network_alone, beside(), with_loss_cell):
            network, model = new_model(make_model, amp_level=level, loss_scale_manager=None)
            assert model.predict_network is model.eval_network._network is network


class Logits(nn.Cell):
    """The logits in the network's precision; the test networks return them in float32."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, x):
        return self.network.logits(x)


def test_the_loss_of_a_network_in_low_precision_is_float32(pynative):
    """Of the same logits. In the network the loss is of its precision, as it is without accumulation."""
    options = {"kind": "conv", "amp_level": "O2", "loss_scale_manager": None}
    model, alone, with_cell = (
        new_model(lambda network, *rest, make=make, **options: make(Logits(network), *rest, **options), **options)[1]
        for make in (beside(), network_alone, with_loss_cell)
    )

    def first_loss(model):
        history = train.History()
        model.train(1, data_set(-BATCH * (BATCHES - 2)), callbacks=[history])
        return float(np.ravel(history.history["net_output"])[0])

    x = ms.Tensor(batches(BATCH, 1)[0][0])
    assert model.eval(held_out()) == alone.eval(held_out())
    np.testing.assert_array_equal(model.predict(x).asnumpy(), alone.predict(x).asnumpy())
    assert with_cell.eval(held_out()) == pytest.approx(alone.eval(held_out()), rel=1e-3)
    loss = first_loss(model)
    assert loss == pytest.approx(first_loss(alone), rel=3e-7)
    assert first_loss(with_cell) != pytest.approx(loss, rel=3e-7)


class Returns(nn.Cell):
    """A cross-entropy in another form."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.mean = nn.CrossEntropyLoss()
        self.sum = nn.CrossEntropyLoss(reduction="sum")

    def construct(self, logits, labels):
        if self.form == "aux":
            return self.mean(logits, labels), logits, labels
        if self.form == "ratio":
            return self.sum(logits, labels), ops.ones_like(labels).astype(ms.float32).sum()
        if self.form == "several":
            return self.mean(logits, labels), 3 * self.mean(logits, labels)
        return self.sum(logits, labels)


class LogitsAndLabels(nn.Cell):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def construct(self, x, y):
        return self.network(x), y


def halves(x, y):
    middle = (len(x) + 1) // 2
    return [(x[:middle], y[:middle]), (x[middle:], y[middle:])]


def beside(loss=None, size=4, **options):
    """A function that makes a model of a cell with these options."""

    def make_model(network, cross_entropy, optimizer, **others):
        return ms.Model(GradAccumulationCell(network, size, **options), loss or cross_entropy, optimizer, **others)

    return make_model


def batch_loss(network, loss, optimizer, **options):
    cell = GradAccumulationCell(WithBatchLossCell(LogitsAndLabels(network), loss), 4)
    return ms.Model(cell, optimizer=optimizer, **options)


ROWS = {
    "aux": lambda: beside(Returns("aux"), aux=True),
    "ratio": lambda: beside(Returns("ratio"), reduction="ratio"),
    "several": lambda: beside(Returns("several"), loss_weights=(0.25, 0.25)),
    "per_sample": lambda: beside(PerSampleLoss(nn.CrossEntropyLoss(reduction="none"))),
    "count": lambda: beside(count=CountNotIgnored()),
    "split": lambda: beside(size=None, split=halves),
    "windows": lambda: beside(accumulation_steps=1),
    "batch_loss": lambda: batch_loss,
}


@functools.cache
@eagerly()
def trained_and_evaluated(make_model):
    network, model = new_model(make_model, rate=0.1)
    model.fit(1, data_set(RAGGED), held_out(), dataset_sink_mode=False)
    return [model.eval(held_out(), dataset_sink_mode=False), *(as_numpy(one) for one in network.get_parameters())]


@pytest.mark.parametrize("row", ROWS)
def test_each_option_trains_and_evaluates_beside_a_loss_function(row, pynative):
    results, *weights = trained_and_evaluated(ROWS[row]())
    results_alone, *weights_alone = trained_and_evaluated(network_alone)
    assert results == pytest.approx(results_alone, rel=1e-5)
    for weight, alone in zip(weights, weights_alone, strict=True):
        assert relative_error(weight, alone) < 1e-5


def test_a_loss_that_is_a_sum_is_evaluated_as_a_sum_and_one_of_the_whole_batch_predicts_representations(pynative):
    _, model = new_model(beside(Returns("sum"), reduction="sum"))
    _, alone = new_model(lambda network, loss, *rest, **options: ms.Model(network, Returns("sum"), *rest, **options))
    assert model.eval(held_out()) == pytest.approx(alone.eval(held_out()), rel=1e-6)
    network, model = new_model(batch_loss)
    x, y = map(ms.Tensor, batches(BATCH, 1)[0])
    np.testing.assert_array_equal(model.predict(x, y)[0].asnumpy(), network(x).asnumpy())


def test_ratios_are_evaluated_as_they_are_trained():
    """Of several losses too, as semi-auto mode trains them; without items they are zero."""

    class Ratios(nn.Cell):
        def construct(self, outputs, label):
            return outputs.sum(), label.sum(), 2 * outputs.sum(), label.sum()

    cell = GradAccumulationCell(make_network("dense"), 2, reduction="ratio", loss_weights=(1.0, 0.25), min_count=0.5)
    _, loss = parts_of(cell, Ratios())
    for items, expected in (([2.0, 1.0], 6 / 3 + 3 / 3), ([0.0, 0.0], 6 / 0.5 + 3 / 0.5)):
        assert float(loss(ms.Tensor([2.0, 4.0]), ms.Tensor(items))) == pytest.approx(expected)
    _, loss = parts_of(cell.with_options(min_count=None), Ratios())
    assert float(loss(ms.Tensor([2.0, 4.0]), ms.Tensor([0.0, 0.0]))) == 0


class OwnLoss(nn.Cell):
    """Returns its loss, and nothing shows how it is computed."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.loss = nn.CrossEntropyLoss()

    def construct(self, x, y):
        return self.loss(self.network(x), y)


def test_what_cannot_be_derived_is_one_error_that_names_two_ways(pynative):
    network = make_network("dense")
    loss, optimizer = nn.CrossEntropyLoss(), nn.SGD(network.trainable_params(), 0.1)
    cell = GradAccumulationCell(OwnLoss(network), 4)
    ways = r"ms.Model\(GradAccumulationCell\(net, ...\), loss_fn, .* eval_network=nn.WithEvalCell\(net, loss_fn\)"
    with pytest.raises(ValueError, match=f"got a 'OwnLoss', in which the loss is not known. .*{ways}"):
        ms.Model(cell, optimizer=optimizer, metrics={"accuracy"})
    evaluating = {"eval_network": nn.WithEvalCell(network, loss), "eval_indexes": [0, 1, 2]}
    model = ms.Model(cell, optimizer=optimizer, metrics={"loss"}, **evaluating)
    assert model.eval(data_set()) == ms.Model(network, loss, metrics={"loss"}).eval(data_set())
    assert model.predict(*map(ms.Tensor, batches(BATCH, 1)[0])).shape == ()
    for of_batch in (cell, GradAccumulationCell(WithBatchLossCell(network, loss), 4)):
        with pytest.raises(ValueError, match="beside 'loss_fn' the network must return no loss and take one input"):
            ms.Model(of_batch, loss, optimizer)
    with pytest.raises(TypeError, match="'loss_fn' must be a Cell, but got 'mse'"):
        mindspore.amp.build_train_network(GradAccumulationCell(network, 4), optimizer, "mse")


def test_a_network_that_returns_no_loss_is_told_how(pynative):
    network = make_network("dense")
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    names = r"a 'DenseNet' with construct\(x\). .* ms.Model\(GradAccumulationCell\(net, ...\), loss_fn, optimizer\)"
    for options in ({}, {"aux": True}, {"micro_size": None, "split": halves}):
        cell = GradAccumulationCell(network, **({"micro_size": 4} | options))
        with pytest.raises(TypeError, match=f"must take the 2 input.s. of the batch and return its loss, .*{names}"):
            ms.Model(cell, optimizer=optimizer).train(1, data_set())
    only_data = NumpySlicesDataset(batches(BATCH, 1)[0][0], ["x"], shuffle=False).batch(BATCH)
    message = r"must return a scalar loss .* got shape \(2, 5\).* give one: ms.Model\(cell, loss"
    with pytest.raises(ValueError, match=message):
        ms.Model(GradAccumulationCell(network, 4), optimizer=optimizer).train(1, only_data)
