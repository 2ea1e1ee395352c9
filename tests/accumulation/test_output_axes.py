"""The axis of samples of each output: found from two numbers of samples, so that no length says anything by chance."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import EvenSplit, WithBatchLossCell
from gaccum_ms.accumulation.output_axes import Output
from gaccum_ms.splitting.even_split import UNCUT
from tests.support.modes import eagerly
from tests.support.reference import as_numpy, make_step, relative_error, vector

pytestmark = pytest.mark.filterwarnings("ignore:.*writes state in 'construct'")
TIME, FEATURES, HIDDEN = 5, 3, 4


class Recurrent(nn.Cell):
    """A time-major network. Beside the loss it returns its state (layers, N, H), all time steps (T, N, H), a number,
    and its weight of shape (1, H), which no sample changes. A Parameter counts its runs."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Dense(FEATURES, HIDDEN)
        self.head = nn.Dense(HIDDEN, 1)
        self.runs = ms.Parameter(Tensor(0.0), name="runs", requires_grad=False)
        random = np.random.default_rng(1)
        for weight in self.trainable_params():
            weight.set_data(Tensor(random.normal(size=weight.shape) * 0.5, ms.float32))

    def construct(self, x, y):
        steps = ops.tanh(ops.cumsum(self.inner(x), 0))
        state = ops.stack((steps[-1], ops.square(steps[-1])))
        loss = ops.square(self.head(steps[-1]) - y).mean()
        loss = ops.depend(loss, ops.assign_add(self.runs, Tensor(1.0)))
        return loss, state, steps, loss * 2, self.head.weight


class Drawing(Recurrent):
    """The same, with a random operator that changes nothing. A graph has copies of such a network."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(p=0.5)

    def construct(self, x, y):
        return super().construct(x + 0 * self.drop(x), y)


class LossAlone(nn.Cell):
    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, *inputs):
        return self.network(*inputs)[0]


def data(samples, seed=0):
    random = np.random.default_rng(seed)
    x, y = random.normal(size=(TIME, samples, FEATURES)), random.normal(size=(samples, 1))
    return Tensor(x, ms.float32), Tensor(y, ms.float32)


def step_of(network, **options):
    return make_step(network, **{"aux": True, "split": EvenSplit(axis=(1, 0)), **options})


@pytest.mark.core(mode="pynative")
@pytest.mark.parametrize(
    ("samples", "kind", "mode"), [(4, Recurrent, "pynative"), (7, Drawing, "graph")], indirect=["mode"]
)
def test_each_output_is_joined_along_its_axis_of_samples(samples, kind, mode):
    """Four samples are two micro-batches of two, as many as there are layers; seven are 4 + 3."""
    batch = data(samples)
    whole = Recurrent()
    with eagerly():
        _, state, steps, _, weight = (as_numpy(output) for output in whole(*batch))
        loss = nn.TrainOneStepCell(LossAlone(whole), nn.SGD(whole.trainable_params(), 0.1)).set_train()(*batch)
    network = kind()
    outputs = step_of(network, micro_size=2)(*batch)
    np.testing.assert_allclose(outputs[0].asnumpy(), loss.asnumpy(), rtol=1e-5)
    np.testing.assert_allclose(outputs[1].asnumpy(), state, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(outputs[2].asnumpy(), steps, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(outputs[3].asnumpy(), 2 * loss.asnumpy(), rtol=1e-5)
    np.testing.assert_array_equal(outputs[4].asnumpy(), weight)
    assert [type(output) for output in outputs] == [Tensor] * 5  # never the Parameter, which the update has changed
    assert relative_error(as_numpy(network.head.weight), as_numpy(whole.head.weight)) < 1e-5
    assert float(network.runs.asnumpy()) == 2, "what looks at the network leaves no trace"


class Shares(nn.Cell):
    """Returns outputs that are not per sample, though two samples, as in each micro-batch, make them look so."""

    def __init__(self, kind):
        super().__init__()
        self.dense = nn.Dense(3, 2, weight_init="ones", bias_init="zeros")
        self.kind = kind

    def construct(self, x):
        found = self.dense(x)
        loss = ops.square(found).mean()
        if self.kind == "means":
            return loss, x, (found * Tensor([1.0, 2.0])).mean(axis=0)
        if self.kind == "later":
            return loss, (found > 9).astype(ms.int32).sum(axis=0)
        return loss, ops.concat((found, -found))


@pytest.mark.parametrize(
    ("kind", "mode", "got"),
    [
        ("means", "graph", r"but output 2 got shape \(2,\) for 2 sample\(s\) and shape \(2,\) for 4. Return a mean"),
        ("twice", "pynative", r"but output 1 got shape \(4, 2\) for 2 sample\(s\) and shape \(8, 2\) for 4"),
        ("later", "pynative", "must be the same for all micro-batches, but got another value for a later one"),
    ],
    indirect=["mode"],
    ids=["means", "twice", "later"],
)
def test_what_no_axis_of_samples_has_is_refused_before_an_update(kind, got, mode):
    """The first micro-batches count nothing; the last one does, which only the run can show."""
    network = Shares(kind)
    step = step_of(network, micro_size=4, split=None)
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    x[-1] = 20
    with pytest.raises(ValueError, match=got):
        step(Tensor(x))
    np.testing.assert_array_equal(as_numpy(network.dense.weight), np.ones((2, 3), np.float32))
    assert int(step.update_count.asnumpy()) == 0


class OneSize(Shares):
    """Takes micro-batches of two alone."""

    def construct(self, x):
        found = self.dense(x.reshape((2, 3)))
        return ops.square(found).mean(), found


def test_a_network_that_takes_one_size_alone_is_asked_about_it(pynative):
    _, rows = step_of(OneSize(""), micro_size=2, split=None)(Tensor(np.arange(12).reshape(4, 3), ms.float32))
    np.testing.assert_array_equal(rows.asnumpy(), np.repeat([[3.0], [12], [21], [30]], 2, axis=1))


def output(shape, other, samples=(2, 3), equal=True):
    return Output(1, samples, (np.ones(shape), np.ones(other) * (1 if equal else 2)))


@pytest.mark.parametrize(
    ("two_runs", "axis"),
    [
        (output((2, 5), (3, 5)), 0),
        (output((2, 2, 5), (2, 3, 5)), 1),
        (output((2, 5), (2, 5)), UNCUT),
        (output((2, 5), (2, 5), equal=False), None),
        (output((2, 2), (3, 3)), None),
        (output((4, 5), (6, 5)), None),
        (output((2, 5), (3, 6)), None),
        (output((2, 5), (3,)), None),
        (output((2, 2), (2, 2), samples=(2, 2)), 0),
        (output((5,), (5,), samples=(2, 2)), None),
    ],
)
def test_the_axis_that_grows(two_runs, axis):
    assert two_runs.axis() == axis


# -- representations of a loss of the whole batch ----------------------------------------------------------------------


class Towers(nn.Cell):
    """A state of shape (layers, N, H), rows, and a temperature that no sample changes."""

    def __init__(self):
        super().__init__()
        self.recurrent = Recurrent()
        self.temperature = ms.Parameter(Tensor(0.7), name="temperature")

    def construct(self, x, y):
        _, state, _, _, weight = self.recurrent(x, y)
        return state, y, ops.exp(self.temperature), weight


class Contrast(nn.Cell):
    def construct(self, state, y, scale, weight):
        rows = ops.concat((state[-1], y), axis=1)
        scores = rows @ rows.T * scale + ops.square(state[0]).mean() + weight.sum()
        return ops.cross_entropy(scores, ops.arange(rows.shape[0]))


def test_representations_have_samples_on_any_axis_or_are_shared(pynative):
    results = []
    for micro_size in (3, 1):
        network = WithBatchLossCell(Towers(), Contrast())
        step = step_of(network, micro_size=micro_size, aux=False)
        losses = [float(step(*data(7)).asnumpy()) for _ in range(2)]
        results.append(np.concatenate([losses, vector(step.weights)]))
    assert relative_error(*results) < 1e-5
