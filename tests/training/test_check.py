"""The proof at the first batch within a training: it changes no bit, says one text, and is left out where asked."""

from __future__ import annotations

import random
import warnings

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import CountNotIgnored, GradAccumulator
from gaccum_ms.backend import kernel_seeds
from tests.support.reference import Outer, make_step

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(8, 6)).astype(np.float32)
Y = RANDOM.normal(size=(8, 1)).astype(np.float32)
LABELS = np.array([0, -100, -100, 1, 2, 0, 1, -100], np.int32)
MEASURED = "as measured on the loss"
DROPS = not ms.__version__.startswith("2.7.")  # there Dropout's masks differ between two runs from its sixth call on


class Stats:
    calls = 0


class Everything(nn.Cell):
    """It draws from all generators, and writes all kinds of state."""

    def __init__(self, eager):
        super().__init__()
        self.dense, self.norm, self.out = nn.Dense(6, 4), nn.BatchNorm1d(4), nn.Dense(4, 1)
        self.drop, self.eager = nn.Dropout(p=0.5), eager
        self.centre = ms.Parameter(Tensor(np.zeros(4, np.float32)), requires_grad=False)
        self.shapes, self.stats, self.own = [], Stats(), np.random.default_rng(3)

    def construct(self, x, y):
        hidden = self.norm(self.dense(x))
        if DROPS:
            hidden = self.drop(hidden)
        hidden = hidden + 0.1 * ops.standard_normal(hidden.shape)
        hidden = ops.depend(hidden, ops.assign(self.centre, 0.9 * self.centre + 0.1 * hidden.mean(0)))
        if self.eager:
            self.shapes.append(x.shape)
            self.stats.calls += 1
            hidden = hidden + float(np.random.normal() + random.random() + self.own.normal())
        return ops.square(self.out(hidden) - y).mean() + 0 * self.centre.sum()


def in_quarters(x, y):
    return list(zip(x.split(2), y.split(2), strict=True))


# The ways to train: a mode, and the cell's options, each with another runner; or a loop.
WAYS = {
    "graph": (ms.GRAPH_MODE, {"micro_size": 4}),
    "split": (ms.GRAPH_MODE, {"split": in_quarters}),
    "windows": (ms.GRAPH_MODE, {"micro_size": 4, "accumulation_steps": 2}),
    "pynative": (ms.PYNATIVE_MODE, {"micro_size": 4}),
    "loop": (ms.PYNATIVE_MODE, {}),
}


def trained(way: str, check) -> dict[str, object]:
    """Everything visible after three updates."""
    mode, options = WAYS[way]
    ms.set_context(mode=mode)
    ms.set_seed(5), np.random.seed(5), random.seed(5)
    network = Everything(eager=way in ("pynative", "loop")).set_train()
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if way == "loop":
            trained = GradAccumulator(optimizer, 2, check=check)
            grad_fn = trained.value_and_grad(network)
            losses = []
            for half in (slice(0, 4), slice(4, 8)) * 3:
                loss, gradients = grad_fn(Tensor(X[half]), Tensor(Y[half]))
                trained(gradients)
                losses.append(loss.asnumpy())
        else:
            trained = make_step(network, lambda weights: optimizer, check=check, **options)
            losses = [trained(Tensor(X), Tensor(Y)).asnumpy() for _ in range(3)]
    assert str(trained.run_record.loss_check).startswith("skipped" if check is None else ("equal", "undecided"))
    return {
        "losses": losses,
        "names": [parameter.name for parameter in trained.get_parameters()],
        "values": [parameter.asnumpy().copy() for parameter in trained.get_parameters()],
        "generators": [ms.get_rng_state().asnumpy(), np.random.get_state()[1], random.getstate()],
        "seeds": dict(kernel_seeds),
        "state": [network.shapes, network.stats.calls, network.own.bit_generator.state],
        "modes": [(cell.training, cell.requires_grad) for _, cell in network.cells_and_names()],
    }


@pytest.mark.parametrize("way", WAYS)
def test_a_training_has_the_same_bits_with_and_without_it(way):
    seeds = dict(kernel_seeds)
    measured = trained(way, "first_batch")
    kernel_seeds.clear()
    kernel_seeds.update(seeds)
    plain = trained(way, None)
    for name, value in plain.items():
        np.testing.assert_equal(measured[name], value, err_msg=name)


class Loss(nn.Cell):
    def __init__(self, loss, outputs=1):
        super().__init__()
        weight = np.linspace(-1, 1, 6 * outputs).reshape(outputs, 6).astype(np.float32)
        self.net, self.loss = nn.Dense(6, outputs, weight_init=Tensor(weight), bias_init="zeros"), (loss,)

    def construct(self, x, y):
        return self.loss[0](self.net(x), y)


def sum_of_squares(outputs, targets):
    return ops.square(outputs - targets).sum()


def root(outputs, targets):
    return ops.sqrt(ops.square(outputs - targets).mean())


def texts_of(call, *batches):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches:
            call(*map(Tensor, batch))
    assert all(each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught]


def step_of(network, **options):
    return make_step(network, lambda weights: nn.SGD(weights, 0.01), **{"micro_size": 4, **options})


def loop_of(network, count=lambda x, y: None):
    """A loop, and its accumulator."""
    accumulator = GradAccumulator(nn.SGD(network.trainable_params(), 0.01), 2, jit=False)
    grad_fn = accumulator.value_and_grad(network)
    return lambda x, y: accumulator(grad_fn(x, y)[1], count(x, y)), accumulator


def test_a_wrong_loss_is_told_once_with_numbers_and_the_remedy(mode):
    step = step_of(Loss(sum_of_squares))
    (text,) = texts_of(step, (X, Y), (X, Y))
    assert text.startswith(f"For 'GradAccumulationCell', the loss is not what the options say, {MEASURED}: ")
    assert "all of them together have" in text and "gaccum_ms.audit" in text
    assert 'This was tried, and makes it equal: it is a sum: reduction="sum"' in text
    assert "different: parts of" in str(step.run_record)
    assert texts_of(step_of(Loss(sum_of_squares), reduction="sum"), (X, Y)) == []


@pytest.mark.parametrize(("loss", "told"), [(sum_of_squares, 'reduction="sum"'), (root, None)])
def test_batches_of_a_window_decide_at_the_second_and_tell_with_a_remedy_alone(loss, told, pynative):
    """Two batches together may be no batch: a loss that compares samples is not told."""
    halves = (X[:4], Y[:4]), (X[4:], Y[4:])
    step = step_of(Loss(loss), micro_size=None, accumulation_steps=2)
    assert texts_of(step, halves[0]) == []
    texts = texts_of(step, halves[1], *halves)
    assert len(texts) == (told is not None) and all(told in text for text in texts)
    texts = texts_of(loop_of(Loss(loss))[0], *halves, *halves)
    assert len(texts) == (told is not None) and all(told in text for text in texts)


def test_what_is_known_of_a_loss_is_said_before_its_window_ends(pynative):
    """Where the measurement waits for a batch that does not come: of the samples' losses none is finite alone."""
    labels = np.array([0, 1, 2, 1, -100, -100, -100, 1], np.int32)
    network = nn.WithLossCell(nn.Dense(6, 3, weight_init="zeros"), nn.CrossEntropyLoss())
    (text,) = texts_of(loop_of(network)[0], (X[:4], labels[:4]), (X[4:], labels[4:]))
    assert "CountNotIgnored()" in text and MEASURED not in text


def test_the_counts_that_a_loop_gives_are_measured(pynative):
    halves = (X[:4], LABELS[:4]), (X[4:], LABELS[4:])
    loop, accumulator = loop_of(Loss(ops.cross_entropy, 3), CountNotIgnored())
    assert texts_of(loop, *halves, *halves) == []
    assert "equal: parts of 4, 4 sample(s)" in str(accumulator.run_record)
    loop, accumulator = loop_of(Loss(ops.cross_entropy, 3), lambda x, y: len(y))
    (text,) = texts_of(loop, *halves, *halves)
    assert MEASURED in text and "accumulator(gradients, gaccum_ms.CountNotIgnored()(*batch))" in text


def test_it_is_left_out_where_the_user_asks(pynative, monkeypatch):
    assert texts_of(step_of(Loss(sum_of_squares), check=None), (X, Y)) == []
    monkeypatch.setenv("GACCUM_MS_CHECK", "none")
    step = step_of(Loss(sum_of_squares))
    assert texts_of(step, (X, Y)) == []
    assert "skipped: GACCUM_MS_CHECK=none" in str(step.run_record)


def test_what_another_graph_has_trained_is_measured_at_the_first_call_from_python():
    ms.set_context(mode=ms.GRAPH_MODE)
    step = step_of(Loss(sum_of_squares))
    assert texts_of(Outer(step).set_train(), (X, Y)) == []
    assert "undecided: another graph calls the step" in str(step.run_record)
    (text,) = texts_of(step, (X, Y))
    assert MEASURED in text and 'reduction="sum"' in text
