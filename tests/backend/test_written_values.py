"""Every kind of window trains with values that are written into Parameters between two calls, like MindSpore's own
step, whose graph has no control flow."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.common.initializer import initializer
from mindspore.train import EarlyStopping

from gaccum_ms import GradAccumulationCell, GradAccumulator, TrainOneStepWithGradAccumulationCell, WithBatchLossCell
from gaccum_ms.backend import graphs
from gaccum_ms.training import lifecycle
from tests.support.modes import eagerly
from tests.support.reference import Outer, relative_error
from tests.support.two_ranks import case

FEATURES, OUTPUTS, SAMPLES = 3, 2, 6
TOLERANCE = 1e-5


def values(shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class Bootstrap(nn.Cell):
    """A trained network beside a target network that is only read, as in DQN, BYOL and MoCo."""

    def __init__(self):
        super().__init__()
        self.online = nn.Dense(FEATURES, OUTPUTS, Tensor(values((OUTPUTS, FEATURES), 6)), "zeros")
        self.target = nn.Dense(FEATURES, OUTPUTS, Tensor(values((OUTPUTS, FEATURES), 7)), "zeros")
        for parameter in self.target.get_parameters():
            parameter.requires_grad = False
        # In a tuple: MindSpore does not list it among the Cell's Parameters.
        self.unlisted = (ms.Parameter(Tensor(np.ones(OUTPUTS), ms.float32), name="unlisted", requires_grad=False),)

    def construct(self, x, y):
        return ops.square(self.online(x) - self.target(x) * self.unlisted[0] - y).mean()


class Backbone(nn.Cell):
    """The same networks, for a loss over the outputs of the whole batch."""

    def __init__(self):
        super().__init__()
        self.both = Bootstrap()

    def construct(self, x, y):
        return self.both.online(x) - self.both.target(x) * self.both.unlisted[0] - y


class MeanSquare(nn.Cell):
    def construct(self, difference):
        return ops.square(difference).mean()


def count(x, y):
    return ops.ones_like(x[:, 0]).sum()


WINDOWS = {"samples": {}, "counts": {"count": count}, "several batches": {"accumulation_steps": 2}, "batch loss": {}}


class Training:
    """A network with its optimizer, trained by MindSpore's step on whole batches, or by ours with `options` ."""

    def __init__(self, window: str | None = None, jit: bool | None = None):
        self.network = Backbone() if window == "batch loss" else Bootstrap()
        self.both = self.network.both if window == "batch loss" else self.network
        self.optimizer = nn.Momentum(self.network.trainable_params(), 0.1, 0.9)
        self.batches = 2 if window == "several batches" else 1
        self.losses: list[float] = []
        if window is None:
            self.step = nn.TrainOneStepCell(self.network, self.optimizer)
        else:
            trained = WithBatchLossCell(self.network, MeanSquare()) if window == "batch loss" else self.network
            cell = GradAccumulationCell(trained, 3, jit=jit, **WINDOWS[window])
            self.step = TrainOneStepWithGradAccumulationCell(cell, self.optimizer)
        self.step.set_train()

    def train(self, x, y) -> None:
        size = SAMPLES // self.batches
        for start in range(0, SAMPLES, size):
            loss = self.step(Tensor(x[start : start + size]), Tensor(y[start : start + size]))
        loss = loss[0] if isinstance(loss, tuple) else loss
        if self.batches > 1:
            loss = self.step.window_loss
        self.losses.append(float(loss.asnumpy()))


def write_target_by_load_param_into_net(run, folder):
    online = dict(run.both.online.parameters_dict().items())
    target = run.both.target.parameters_dict()
    ms.load_param_into_net(
        run.both.target,
        {there: ms.Parameter(online[here].value(), name=there) for here, there in zip(online, target, strict=True)},
    )


def write_target_by_init_data(run, folder):
    run.both.target.weight.set_data(initializer("ones", (OUTPUTS, FEATURES), ms.float32))
    run.both.target.weight.init_data()


def write_all_by_load_checkpoint(run, folder):
    saved = [
        {"name": one.name, "data": Tensor(values(one.shape, number))}
        for number, one in enumerate(run.network.get_parameters())
    ]
    ms.save_checkpoint(saved, str(folder / "network.ckpt"))
    ms.load_checkpoint(str(folder / "network.ckpt"), run.network)


def write_moments(run, folder):
    for number, moment in enumerate(run.optimizer.moments):
        moment.set_data(Tensor(values(moment.shape, 10 + number)))


WRITES = [
    write_all_by_load_checkpoint,
    lambda run, _: ops.assign(run.both.target.bias, Tensor(values((OUTPUTS,), 3))),
    write_moments,
    lambda run, _: run.optimizer.learning_rate.set_data(Tensor(0.02, ms.float32)),
    lambda run, _: run.optimizer.learning_rate.set_data(0.3),
    write_target_by_init_data,
    write_target_by_load_param_into_net,
    lambda run, _: run.both.unlisted[0].set_data(Tensor(values((OUTPUTS,), 2))),
    lambda run, _: run.both.online.weight.set_data(Tensor(values((OUTPUTS, FEATURES), 1))),
    lambda run, _: run.both.online.bias.set_data(Tensor(np.arange(OUTPUTS), ms.int32)),  # of another dtype
]
JOINED = [(values((SAMPLES, FEATURES), 20 + i), values((SAMPLES, OUTPUTS), 60 + i)) for i in range(len(WRITES) + 2)]


def trained(run: Training, folder, writes=WRITES) -> Training:
    run.train(*JOINED[0])
    run.train(*JOINED[1])
    for write, batch in zip(writes, JOINED[2:], strict=False):
        write(run, folder)
        run.train(*batch)
    return run


@pytest.fixture(scope="module")
def whole_batch(tmp_path_factory):
    """A training by MindSpore's step in graph mode, with each write between two calls."""
    ms.set_context(mode=ms.GRAPH_MODE)
    return trained(Training(), tmp_path_factory.mktemp("whole"))


def assert_same(run: Training, reference: Training) -> None:
    np.testing.assert_allclose(run.losses, reference.losses, rtol=TOLERANCE)
    for one, other in zip(run.both.get_parameters(), reference.both.get_parameters(), strict=True):
        assert relative_error(one.asnumpy(), other.asnumpy()) < TOLERANCE, one.name


@pytest.mark.core("samples")
@pytest.mark.parametrize("window", ["samples", "several batches", "batch loss"])
def test_each_window_trains_with_what_was_written(window, whole_batch, tmp_path):
    assert_same(trained(Training(window), tmp_path), whole_batch)


def test_compiled_in_pynative_mode(whole_batch, tmp_path, pynative):
    assert_same(trained(Training("several batches", jit=True), tmp_path), whole_batch)


def test_the_comparison_finds_values_that_a_graph_does_not_see(whole_batch, tmp_path, monkeypatch):
    """Negative control: MindSpore's graphs with control flow, without the package's measures."""
    monkeypatch.setattr(lifecycle, "keep_in_place", lambda *arguments: None)
    monkeypatch.setattr(graphs, "_note_storage", lambda cell: None)
    run = trained(Training("samples"), tmp_path)
    with pytest.raises(AssertionError):
        assert_same(run, whole_batch)


def write_past_set_data(run, folder):
    """Replace the storage, which MindSpore's methods allow, but no class of MindSpore does."""
    type(run.both.target.weight).assign_value(run.both.target.weight, Tensor(values((OUTPUTS, FEATURES), 4)))


def test_a_write_shares_no_storage_and_compiles_anew_only_in_another_way_with_a_warning(tmp_path):
    """A written Parameter keeps its own storage. By itself, MindSpore's `set_data` makes the target network share the
    online network's storage."""
    run = trained(Training("samples"), tmp_path, WRITES[:1])
    graphs_of_step = set(run.step.compile_cache)
    online, target = run.both.online.weight, run.both.target.weight
    target.set_data(online)
    value = target.asnumpy().copy()
    run.train(*JOINED[0])
    np.testing.assert_array_equal(target.asnumpy(), value)
    assert np.abs(online.asnumpy() - value).max() > 1e-3
    assert run.step.compile_cache == graphs_of_step

    reference = same_state(run)
    write_past_set_data(run, tmp_path)
    with pytest.warns(UserWarning, match=r"got other storage for target\.weight"):
        run.train(*JOINED[1])
    run.train(*JOINED[2])
    write_past_set_data(reference, tmp_path)
    with eagerly():
        reference.train(*JOINED[1])
        reference.train(*JOINED[2])
    assert_same(run, reference)


def same_state(run: Training) -> Training:
    """A training by MindSpore's step that goes on from another's state."""
    reference = Training()
    pairs = zip(run.network.get_parameters(), reference.network.get_parameters(), strict=True)
    for mine, other in (*pairs, *zip(run.optimizer.moments, reference.optimizer.moments, strict=True)):
        other.set_data(Tensor(mine.asnumpy()))
    run.losses.clear()
    return reference


def test_a_step_within_another_graph_sees_what_was_written(whole_batch, tmp_path):
    run = Training("samples")
    run.step = Outer(run.step).set_train()
    assert_same(trained(run, tmp_path), whole_batch)


def test_grad_accumulator_updates_what_was_written(whole_batch, tmp_path, pynative):
    run = Training()
    gradients_of = ms.value_and_grad(run.network, None, run.optimizer.parameters)
    accumulator = GradAccumulator(run.optimizer, 2, jit=True)
    for write, (x, y) in zip([None, None, *WRITES], JOINED, strict=True):
        if write is not None:
            write(run, tmp_path)
        losses = []
        for half in np.split(np.arange(SAMPLES), 2):
            loss, gradients = gradients_of(Tensor(x[half]), Tensor(y[half]))
            accumulator(gradients)
            losses.append(float(loss.asnumpy()))
        run.losses.append(np.mean(losses))
    assert_same(run, whole_batch)


def test_early_stopping_restores_the_best_weights():
    """In a training by ms.Model, the step goes on with the restored weights."""
    run = Training("samples")
    x, y = JOINED[0]
    data_set = ms.dataset.NumpySlicesDataset((x, y), shuffle=False).batch(SAMPLES)
    model = ms.Model(run.step)
    stop = EarlyStopping(monitor="loss", patience=1, restore_best_weights=True)

    class Worse(ms.train.Callback):
        """Reports a loss that is worse after each epoch."""

        def on_train_epoch_end(self, run_context):
            arguments = run_context.original_args()
            arguments.net_outputs = Tensor(float(arguments.cur_epoch_num), ms.float32)

    stopped, seen = run.both.online.weight, []
    model.train(1, data_set)
    note = ms.train.LambdaCallback(on_train_epoch_end=lambda _: seen.append(stopped.asnumpy().copy()))
    model.train(4, data_set, callbacks=[Worse(), note, stop])
    np.testing.assert_array_equal(stopped.asnumpy(), seen[0])
    reference = same_state(run)
    run.train(x, y)
    run.train(x, y)
    with eagerly():
        reference.train(x, y)
        reference.train(x, y)
    assert_same(run, reference)


@pytest.mark.thorough
@pytest.mark.distributed
def test_on_two_ranks(rank_pair, tmp_path):
    """With counts, a rank reports the loss of all ranks."""
    results = rank_pair.worker("tests.ranks.written_worker", tmp_path)
    for rank in results:
        rank["counts/losses"], rank["whole/losses"]  # runs the cases
    losses = np.mean([rank["whole/losses"] for rank in results], axis=0)
    for rank in results:
        np.testing.assert_allclose(rank["counts/losses"], losses, rtol=2 * TOLERANCE)
        weights = case(rank, "whole")
        del weights["losses"]
        for name, value in weights.items():
            assert relative_error(rank[f"counts/{name}"], value) < 2 * TOLERANCE, name
