"""`ms.Model`, `build_train_network` and the callbacks work as without accumulation."""

from __future__ import annotations

import re

import mindspore as ms
import mindspore.amp
import mindspore.train
import numpy as np
import pytest
from mindspore import nn, train
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import amp

from gaccum_ms import GradAccumulationCell, TrainOneStepWithGradAccumulationCell
from gaccum_ms.model_hook import _original, build_train_network
from tests.support.reference import OPTIMIZERS, Outer, as_numpy, batches, make_network, relative_error
from tests.support.reuse import Reused
from tests.support.state import assert_close

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


def by_build_train_network(loss_cell, optimizer):
    return ms.Model(mindspore.amp.build_train_network(GradAccumulationCell(loss_cell, 4), optimizer))


def by_step(loss_cell, optimizer):
    return ms.Model(TrainOneStepWithGradAccumulationCell(GradAccumulationCell(loss_cell, 4), optimizer))


def by_model_with_loss_scale(loss_cell, optimizer):
    cell, manager = GradAccumulationCell(loss_cell, 4), ms.amp.DynamicLossScaleManager(2.0**10, 2, 1000)
    return ms.Model(cell, optimizer=optimizer, loss_scale_manager=manager)


def by_model_with_options(loss_cell, optimizer):
    cell = GradAccumulationCell(loss_cell, 4, max_grad_norm=0.5, overflow="drop_micro_batch")
    return ms.Model(cell, optimizer=optimizer)


class Models(Reused):
    """Models whose graphs are compiled once; each call returns a model in its initial state."""

    def __init__(self):
        super().__init__(self.make_step)
        self.models = {}

    def make_step(self, make_model):
        network = make_network("dense")
        optimizer = OPTIMIZERS["momentum"](network.trainable_params())
        model = make_model(nn.WithLossCell(network, nn.CrossEntropyLoss()), optimizer)
        self.models[model.train_network] = model
        return model.train_network

    def __call__(self, make_model):
        return self.models[super().__call__(make_model)]


models = Models()


def fit(make_model, callbacks=(), epochs=EPOCHS, last=BATCH):
    """Train, and return the weights and the optimizer's state."""
    model = models(make_model)
    model.train(epochs, data_set(last), callbacks=list(callbacks))
    step = model.train_network
    return {p.name: as_numpy(p) for p in [*step.network.get_parameters(), *step.optimizer.get_parameters()]}


@pytest.mark.core("graph-by_model-6", "graph-by_build_train_network-8", "graph-by_step-8", "pynative-by_model-6")
@pytest.mark.parametrize(
    ("make_model", "last"),
    [(by_model, RAGGED), (by_build_train_network, BATCH), (by_step, BATCH)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_every_way_in_equals_the_whole_batch(make_model, last, mode):
    epochs = EPOCHS if mode == "graph" else 1
    assert_close(fit(make_model, epochs=epochs, last=last), fit(plain, epochs=epochs, last=last))


# -- the hook ----------------------------------------------------------------------------------------------------------


def test_the_hook_is_where_mindspore_looks():
    assert amp.build_train_network is mindspore.amp.build_train_network is mindspore.train.build_train_network
    assert amp.build_train_network is build_train_network
    assert build_train_network.__doc__ == _original.__doc__


def test_other_networks_are_built_by_the_original(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "gaccum_ms.model_hook._original", lambda *args, **kwargs: seen.append((args, kwargs)) or "built"
    )
    network = nn.WithLossCell(make_network("dense"), nn.CrossEntropyLoss())
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    assert mindspore.amp.build_train_network(network, optimizer, level="O2", keep_batchnorm_fp32=False) == "built"
    assert seen == [((network, optimizer, None, "O2", "O0"), {"keep_batchnorm_fp32": False})]


def test_other_networks_get_the_same_step_as_before():
    network = make_network("dense")
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    loss = nn.CrossEntropyLoss()
    assert type(ms.Model(network, loss, optimizer).train_network) is nn.TrainOneStepCell
    own = nn.GradAccumulationCell(nn.WithLossCell(network, loss), 2)
    assert type(mindspore.amp.build_train_network(own, optimizer)).__name__ == "_TrainGradAccuStepCell"


def test_the_original_taken_before_our_import_refuses_our_cell():
    cell = GradAccumulationCell(nn.WithLossCell(make_network("dense"), nn.CrossEntropyLoss()), 2)
    with pytest.raises(RuntimeError, match=r"'gaccum_ms' imported before build_train_network is"):
        _original(cell, nn.SGD(cell.trainable_params(), 0.1))


def test_what_would_not_accumulate_is_refused_before_the_first_step(mode):
    network = make_network("dense")
    loss = nn.CrossEntropyLoss()
    cell = GradAccumulationCell(nn.WithLossCell(network, loss), 2)
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    step = TrainOneStepWithGradAccumulationCell(cell, optimizer)
    weights = [as_numpy(p).copy() for p in network.get_parameters()]
    with pytest.raises(ValueError, match=r"must be the outermost one .* but got 'Outer' around it"):
        ms.Model(Outer(cell), optimizer=optimizer)
    with pytest.raises(ValueError, match=r"must be the outermost one .* but got 'TrainOneStepWith"):
        ms.Model(step, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"'loss_fn' must be None, .* but got 'CrossEntropyLoss'"):
        ms.Model(cell, loss_fn=loss, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"'boost_level' must be 'O0', but got 'O1': .* Leave"):
        mindspore.amp.build_train_network(cell, optimizer, boost_level="O1")
    with pytest.raises(ValueError, match=r"with amp_level='O2' must have a cell of its own, .* already has a training"):
        ms.Model(cell, optimizer=optimizer, amp_level="O2")
    for model in (ms.Model(cell), ms.Model(Outer(cell)), ms.Model(cell, loss_fn=loss)):
        with pytest.raises(RuntimeError, match=r"the cell itself is being trained"):
            model.train(1, data_set())
    for weight, parameter in zip(weights, network.get_parameters(), strict=True):
        np.testing.assert_array_equal(as_numpy(parameter), weight)


# -- callbacks ---------------------------------------------------------------------------------------------------------


def test_mindspores_callbacks_see_the_same(tmp_path, capsys):
    """LossMonitor and History see the losses, and TimeMonitor sees each epoch. ModelCheckpoint's files load into a
    network without accumulation."""
    losses, epochs, weights = {}, {}, {}
    for make_model in (plain, by_model):
        folder, history = tmp_path / make_model.__name__, train.History()
        checkpoints = train.ModelCheckpoint("net", str(folder), train.CheckpointConfig(2, keep_checkpoint_max=20))
        trained = fit(make_model, [train.LossMonitor(1), train.TimeMonitor(), history, checkpoints])

        printed = capsys.readouterr().out
        lines = re.findall(r"epoch: (\d+) step: (\d+), loss is ([\d.]+)", printed)
        assert [line[:2] for line in lines] == [(str(i), str(j)) for i in (1, 2, 3) for j in (1, 2, 3)]
        assert len(re.findall(r"Train epoch time: +[\d.]+ ms, per step time: +[\d.]+ ms", printed)) == EPOCHS
        epochs[make_model] = history.epoch
        of_epochs = np.array(history.history["net_output"]).ravel()
        losses[make_model] = np.array([*(float(line[2]) for line in lines), *of_epochs])

        names = [f"net-{step}.ckpt" for step in ("1_2", "2_1", "2_3", "3_2", "3_3")]
        assert sorted(path.name for path in folder.glob("*.ckpt")) == names
        network = make_network("dense")
        assert not ms.load_param_into_net(network, ms.load_checkpoint(str(folder / "net-3_3.ckpt")))[0]
        weights[make_model] = {p.name: as_numpy(p) for p in network.get_parameters()}
        for name, value in weights[make_model].items():
            np.testing.assert_array_equal(value, trained[name])
    assert relative_error(losses[by_model], losses[plain]) < 1e-5
    assert epochs[by_model] == epochs[plain]
    assert_close(weights[by_model], weights[plain])


def test_learning_rate_scheduler_changes_the_rate():
    halved, whole = (
        fit(make, [train.LearningRateScheduler(lambda rate, step: rate * 0.5)]) for make in (by_model, plain)
    )
    assert_close(halved, whole)
    np.testing.assert_allclose(halved["learning_rate"], 0.05 * 0.5**9, rtol=1e-3)


def test_fit_with_an_eval_network_and_early_stopping(capsys):
    """Training makes the held-out loss worse here, so that early stopping must act, at the same epoch."""
    stopped = {}
    for make_model in (plain, by_model):
        network = make_network("dense")
        loss_cell = nn.WithLossCell(network, nn.CrossEntropyLoss())
        optimizer = nn.SGD(network.trainable_params(), 0.5)
        cell = loss_cell if make_model is plain else GradAccumulationCell(loss_cell, 4)
        model = ms.Model(
            cell,
            optimizer=optimizer,
            eval_network=nn.WithEvalCell(network, nn.CrossEntropyLoss()),
            eval_indexes=[0, 1, 2],
            metrics={"loss": train.Loss(), "accuracy": train.Accuracy()},
        )
        x, y = batches(BATCH * BATCHES, 1)[0]
        held_out = NumpySlicesDataset((x, (y + 1) % 5), ["x", "y"], shuffle=False).batch(BATCH)
        history = train.History()
        stopping = train.EarlyStopping(monitor="eval_loss", patience=2)
        model.fit(20, data_set(), held_out, callbacks=[history, stopping], dataset_sink_mode=False)
        stopped[make_model] = stopping.stopped_epoch, history.epoch["epoch"]
        results = model.eval(held_out, dataset_sink_mode=False)
        stopped[make_model] += (round(results["accuracy"], 6), round(results["loss"], 4))
    assert stopped[by_model] == stopped[plain]
    assert len(stopped[plain][1]) < 20


class Read(train.Callback):
    """Reads the step's norm and its dropped micro-batches after each batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_step_end(self, run_context):
        step = run_context.original_args().train_network
        self.seen.append((float(step.grad_norm.asnumpy()), float(step.dropped_micro_batches.asnumpy())))


def test_callbacks_find_norm_and_dropped_micro_batches():
    read = Read()
    fit(by_model_with_options, [read], epochs=1)
    assert len(read.seen) == BATCHES
    assert all(norm > 0 and dropped == 0 for norm, dropped in read.seen)


def test_loss_monitor_and_dynamic_loss_scale(capsys):
    """The step's outputs are MindSpore's (loss, overflow, scale), of which LossMonitor prints the first."""
    losses = []
    for make_model in (plain, by_model_with_loss_scale):
        fit(make_model, [train.LossMonitor(1)], epochs=1)
        losses.append(np.array([float(one) for one in re.findall(r"loss is ([\d.]+)", capsys.readouterr().out)]))
    assert len(losses[0]) == BATCHES
    assert relative_error(losses[1], losses[0]) < 1e-5
