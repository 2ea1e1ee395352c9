"""Windows train with values that are written into Parameters between two calls, like MindSpore's own step, whose graph
has no control flow."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import GradAccumulator
from tests.support.modes import eagerly
from tests.support.reference import make_step, relative_error

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


class Training:
    """A network with its optimizer, trained by MindSpore's step on whole batches, or by ours in windows of so many
    batches."""

    def __init__(self, batches: int | None = None, jit: bool | None = None):
        self.network = Bootstrap()
        self.optimizer = nn.Momentum(self.network.trainable_params(), 0.1, 0.9)
        self.batches = batches or 1
        self.losses: list[float] = []
        self.step = nn.TrainOneStepCell(self.network, self.optimizer).set_train()
        if batches is not None:
            options = {"micro_size": 3, "accumulation_steps": batches, "jit": jit}
            self.step = make_step(self.network, lambda _: self.optimizer, **options)

    def train(self, x, y) -> None:
        for rows in np.split(np.arange(SAMPLES), self.batches):
            loss = self.step(Tensor(x[rows]), Tensor(y[rows]))
        self.losses.append(float((self.step.window_loss if self.batches > 1 else loss).asnumpy()))

    def parameters(self) -> list[ms.Parameter]:
        return [*self.network.get_parameters(), *self.network.unlisted, *self.optimizer.get_parameters()]


def write_target_by_load_param_into_net(run, folder):
    pairs = zip(run.network.online.get_parameters(), run.network.target.get_parameters(), strict=True)
    written = {there.name: ms.Parameter(here.value(), name=there.name) for here, there in pairs}
    ms.load_param_into_net(run.network.target, written)


def write_all_by_load_checkpoint(run, folder):
    parameters = enumerate(run.network.get_parameters())
    saved = [{"name": one.name, "data": Tensor(values(one.shape, number))} for number, one in parameters]
    ms.save_checkpoint(saved, str(folder / "network.ckpt"))
    ms.load_checkpoint(str(folder / "network.ckpt"), run.network)


WRITES = [
    write_all_by_load_checkpoint,
    lambda run, _: [moment.set_data(Tensor(values(moment.shape, 10))) for moment in run.optimizer.moments],
    lambda run, _: run.optimizer.learning_rate.set_data(0.3),
    write_target_by_load_param_into_net,
    lambda run, _: run.network.unlisted[0].set_data(Tensor(values((OUTPUTS,), 2))),
    lambda run, _: run.network.online.bias.set_data(Tensor(np.arange(OUTPUTS), ms.int32)),  # of another dtype
]
JOINED = [(values((SAMPLES, FEATURES), 20 + i), values((SAMPLES, OUTPUTS), 60 + i)) for i in range(len(WRITES) + 2)]


def trained(run: Training, folder) -> Training:
    run.train(*JOINED[0])
    run.train(*JOINED[1])
    for write, batch in zip(WRITES, JOINED[2:], strict=True):
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
    for one, other in zip(run.network.get_parameters(), reference.network.get_parameters(), strict=True):
        assert relative_error(one.asnumpy(), other.asnumpy()) < TOLERANCE, one.name


def test_windows_of_two_batches_compiled_in_pynative_mode(whole_batch, tmp_path, pynative):
    assert_same(trained(Training(2, jit=True), tmp_path), whole_batch)


def write_past_set_data(run):
    """Replace the storage, which MindSpore's methods allow, but no class of MindSpore does."""
    type(run.network.target.weight).assign_value(run.network.target.weight, Tensor(values((OUTPUTS, FEATURES), 4)))


def test_a_write_shares_no_storage_and_compiles_anew_only_in_another_way_with_a_warning(whole_batch, tmp_path):
    """A written Parameter keeps its own storage. By itself, MindSpore's `set_data` makes the target network share the
    online network's storage."""
    run = trained(Training(1), tmp_path)
    assert_same(run, whole_batch)
    graphs_of_step = set(run.step.compile_cache)
    online, target = run.network.online.weight, run.network.target.weight
    target.set_data(online)
    value = target.asnumpy().copy()
    run.train(*JOINED[0])
    np.testing.assert_array_equal(target.asnumpy(), value)
    assert np.abs(online.asnumpy() - value).max() > 1e-3
    assert run.step.compile_cache == graphs_of_step

    reference = Training()  # goes on from the same state, by MindSpore's step
    for mine, other in zip(run.parameters(), reference.parameters(), strict=True):
        other.set_data(Tensor(mine.asnumpy()))
    run.losses.clear()
    write_past_set_data(run)
    with pytest.warns(UserWarning, match=r"got other storage for target\.weight"):
        run.train(*JOINED[1])
    run.train(*JOINED[2])
    write_past_set_data(reference)
    with eagerly():
        reference.train(*JOINED[1])
        reference.train(*JOINED[2])
    assert_same(run, reference)


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
