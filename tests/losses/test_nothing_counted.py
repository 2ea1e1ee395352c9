"""Micro-batches that count nothing: a mean over nothing stays out, a sum or a numerator over nothing belongs in.
`min_count` is the least total. The loss is a detector's: a sum over all samples, divided by the number of positives."""

from __future__ import annotations

import warnings

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import (
    EvenSplit,
    GradAccumulator,
)
from tests.support.reference import as_numpy, make_step
from tests.support.reuse import Reused
from tests.support.state import assert_identical, everything

START = np.linspace(-1, 1, 4)
RATE = 0.5
POSITIVES = [1, 1, 0, 0, 0, 0, 1, 0, 1]  # of three micro-batches, the second has none
NONE = [0] * 9
LEAST = 2.5  # less than the positives: it changes no window that has some


class Detector(nn.Cell):
    """The sum of log(1 + exp(x w)) over all samples; as a ratio, with the number of positives."""

    def __init__(self, returns="sum"):
        super().__init__()
        self.weight = ms.Parameter(Tensor(START, ms.float32), name="weight")
        self.returns = returns

    def construct(self, x, positives):
        rows = ops.log(1 + ops.exp((x * self.weight).sum(-1)))
        total = rows.sum()
        if self.returns == "ratio":
            return total, positives.sum()
        if self.returns == "ratio, aux":
            return total, positives.sum(), rows, total * 2
        if self.returns == "two":
            return total, (rows * rows).sum()
        return total


def positives_of(x, positives):
    return positives.sum()


def samples_of(x, positives):
    return positives.shape[0]


def thirds(x, positives):
    return [(x[start : start + 3], positives[start : start + 3]) for start in range(0, x.shape[0], 3)]


def data(positives, seed=0):
    x = np.random.default_rng(seed).normal(size=(len(positives), 4)).astype(np.float32)
    return x, np.array(positives, np.float32)


def tensors(batch):
    return tuple(Tensor(value) for value in batch)


def oracle(x, positives, least=0.0, weight=START):
    """Loss and gradient of the whole batch."""
    divisor = max(least, positives.sum())
    z = x @ weight
    return np.log(1 + np.exp(z)).sum() / divisor, (1 / (1 + np.exp(-z))) @ x / divisor


def step_of(returns, scale=None, **options):
    momentum = lambda weights: nn.Momentum(weights, RATE, 0.9)  # noqa: E731
    return make_step(Detector(returns), momentum, scale, **options)


steps = Reused(step_of)
WAYS = {
    "sum": {"returns": "sum", "reduction": "sum", "count": positives_of, "micro_size": 3},
    "ratio": {"returns": "ratio", "reduction": "ratio", "micro_size": 9},
    "ratio, aux": {"returns": "ratio, aux", "reduction": "ratio", "micro_size": 3, "aux": True},
    "sum, split": {"returns": "sum", "reduction": "sum", "count": positives_of, "split": thirds},
}


def gradient(step):
    return (START - as_numpy(step.weights[0])) / RATE


@pytest.mark.parametrize(
    ("way", "mode"),
    [("sum", "graph"), ("ratio", "pynative"), ("ratio, aux", "pynative"), ("sum, split", "pynative")],
    indirect=["mode"],
)
def test_a_sum_over_nothing_belongs_in(way, mode):
    batch = data(POSITIVES)
    step = steps(**WAYS[way], min_count=LEAST if way == "sum" else None)
    outputs = step(*tensors(batch))
    loss, *of_samples = outputs if isinstance(outputs, tuple) else (outputs,)
    expected, expected_gradient = oracle(*batch)
    np.testing.assert_allclose(loss.asnumpy(), expected, rtol=1e-5)
    np.testing.assert_allclose(gradient(step), expected_gradient, rtol=1e-4, atol=1e-5)
    assert float(step.window_count.asnumpy()) == sum(POSITIVES)
    if of_samples:  # scalars are divided as the loss is
        np.testing.assert_allclose(of_samples[0].asnumpy(), np.log(1 + np.exp(batch[0] @ START)), rtol=1e-5)
        np.testing.assert_allclose(of_samples[1].asnumpy(), 2 * expected, rtol=1e-5)


@pytest.mark.parametrize(("way", "mode"), [("sum", "graph"), ("ratio", "pynative")], indirect=["mode"])
def test_min_count_is_the_least_total(way, mode):
    """A window without any item updates too."""
    step = steps(**WAYS[way], min_count=LEAST)
    batch = data(NONE)
    loss = step(*tensors(batch))
    expected, expected_gradient = oracle(*batch, LEAST)
    np.testing.assert_allclose(loss.asnumpy(), expected, rtol=1e-5)
    np.testing.assert_allclose(gradient(step), expected_gradient, rtol=1e-4, atol=1e-5)
    assert float(step.window_count.asnumpy()) == 0
    assert int(step.update_count.asnumpy()) == 1


def test_a_window_that_overflowed_as_a_whole_makes_no_update_in_spite_of_min_count(pynative):
    """An update with a gradient of zero would move the weights by their momentum."""
    step = steps(**WAYS["sum"], min_count=LEAST, overflow="drop_micro_batch")
    step(*tensors(data(POSITIVES)))
    before = everything(step)
    step(Tensor(np.full((len(POSITIVES), 4), np.nan, np.float32)), Tensor(np.array(POSITIVES, np.float32)))
    assert int(step.dropped_micro_batches.asnumpy()) > 0
    records = ("batch_count", "window_count", "dropped_micro_batches")
    assert_identical(everything(step), before, but=[f"gaccum_ms.{name}" for name in records])


def test_batches_that_share_an_update(pynative):
    """The first batch of a window, which sets the unit, and its first micro-batches count nothing."""
    options = {**WAYS["sum"], "accumulation_steps": 2, "min_count": 1.0}
    step = steps(**options)
    parts = [data(positives, seed) for seed, positives in enumerate([NONE, POSITIVES])]
    losses = [float(step(*tensors(part)).asnumpy()) for part in parts]
    np.testing.assert_allclose(losses, [oracle(*part, 1.0)[0] for part in parts], rtol=1e-5)
    whole = tuple(np.concatenate(column) for column in zip(*parts, strict=True))
    np.testing.assert_allclose(step.window_loss.asnumpy(), oracle(*whole)[0], rtol=1e-5)
    np.testing.assert_allclose(gradient(step), oracle(*whole)[1], rtol=1e-4, atol=1e-5)
    step = steps(**options)
    step(*tensors(parts[0]))
    assert step.flush()
    np.testing.assert_allclose(gradient(step), oracle(*parts[0], 1.0)[1], rtol=1e-4, atol=1e-5)


def test_each_of_several_losses_has_its_own_total(pynative):
    """One loss is divided by positives, with `min_count` , the other by samples."""
    for positives in (POSITIVES, NONE):
        step = steps("two", reduction="sum", count=(positives_of, samples_of), micro_size=3, min_count=2.0)
        x, mask = data(positives)
        loss = step(Tensor(x), Tensor(mask))
        first, first_gradient = oracle(x, mask, 2.0)
        rows, slopes = np.log(1 + np.exp(x @ START)), 1 / (1 + np.exp(-(x @ START)))
        np.testing.assert_allclose(step.loss_terms.asnumpy(), [first, (rows**2).mean()], rtol=1e-5)
        np.testing.assert_allclose(loss.asnumpy(), first + (rows**2).mean(), rtol=1e-5)
        expected = first_gradient + (2 * rows * slopes) @ x / len(x)
        np.testing.assert_allclose(gradient(step), expected, rtol=1e-4, atol=1e-5)


def test_without_min_count_a_window_of_nothing_makes_no_update_and_says_so_once(pynative):
    step = step_of(**WAYS["sum"])
    before = everything(step)
    with pytest.warns(UserWarning, match="'GradAccumulationCell', a window counted nothing on any rank.*min_count=1"):
        step(*tensors(data(NONE)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(step(*tensors(data(NONE))).asnumpy()) == 0.0
    assert_identical(everything(step), before, but=("gaccum_ms.batch_count",))


def test_a_window_of_nothing_adjusts_the_scale_only_if_it_updates(pynative):
    """A dynamic scale counts the windows that went well."""
    for least, doubles in ((1.0, True), (None, False)):
        scale = nn.DynamicLossScaleUpdateCell(2.0, 2, 1)
        step = step_of(scale=scale, min_count=least, **WAYS["sum"])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*counted nothing")
            step(*tensors(data(NONE)))
        assert float(step.update.scale_sense.asnumpy().reshape(())) == (4.0 if doubles else 2.0)


def gradients_of(batch, weight=START):
    return (Tensor((oracle(*batch, 1.0, weight)[1] * max(1.0, batch[1].sum())).astype(np.float32)),)


def test_grad_accumulator_of_sums(pynative):
    """Batches of a loop of one's own, of which the first counts nothing; then a window of nothing alone."""
    network = Detector()
    optimizer = nn.Momentum(network.trainable_params(), RATE, 0.9)
    accumulator = GradAccumulator(optimizer, 2, reduction="sum", min_count=1, jit=False)
    parts = [data(positives, seed) for seed, positives in enumerate([NONE, POSITIVES])]
    assert [accumulator(gradients_of(part), part[1].sum()) for part in parts] == [False, True]
    whole = tuple(np.concatenate(column) for column in zip(*parts, strict=True))
    expected = oracle(*whole)[1]
    np.testing.assert_allclose((START - as_numpy(network.weight)) / RATE, expected, rtol=1e-4, atol=1e-5)
    weight = as_numpy(network.weight)
    accumulator(gradients_of(parts[0]), 0)
    assert accumulator.flush()
    moment = 0.9 * expected + oracle(*parts[0], 1.0)[1]
    np.testing.assert_allclose((weight - as_numpy(network.weight)) / RATE, moment, rtol=1e-4, atol=1e-5)


def test_grad_accumulator_of_nothing_says_so_once(pynative):
    network = Detector()
    accumulator = GradAccumulator(nn.SGD(network.trainable_params(), RATE), 1, jit=False)
    batch = data(NONE)
    with pytest.warns(UserWarning, match="'GradAccumulator', a window counted nothing on any rank.*min_count=1"):
        assert not accumulator(gradients_of(batch), 0)
    assert not accumulator(gradients_of(batch), 0)
    np.testing.assert_array_equal(as_numpy(network.weight), START.astype(np.float32))


@pytest.mark.parametrize("options", [{"reduction": "sum", "overflow": "drop_micro_batch"}, {"min_count": 1.0}])
def test_grad_accumulator_needs_the_counts_that_it_divides_by(options, pynative):
    network = Detector()
    accumulator = GradAccumulator(nn.SGD(network.trainable_params(), RATE), 2, **options)
    with pytest.raises(TypeError, match=r"'GradAccumulator', with 'min_count', or .* but got none"):
        accumulator(gradients_of(data(NONE)))
    assert int(accumulator.window_position.asnumpy()) == 0

    @ms.jit
    def add(gradients):
        return accumulator(gradients)

    with pytest.raises(TypeError, match=r"'GradAccumulator', with 'min_count', or .* but got none"):
        add(gradients_of(data(NONE)))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"reduction": "ratio"}, ValueError, "'reduction' must be one of"),
        ({"min_count": 0}, ValueError, "'min_count' must be positive and finite, but got 0"),
        ({"min_count": "1"}, TypeError, "'min_count' must be a float, but got '1'"),
    ],
)
def test_grad_accumulator_refuses_bad_options(options, error, words):
    with pytest.raises(error, match=f"For 'GradAccumulator', the argument {words}"):
        GradAccumulator(nn.SGD(Detector().trainable_params(), RATE), 2, **options)


class Sums(Detector):
    """Two losses, each divided by its window's total, which is an input."""

    def construct(self, x, positives, totals):
        rows = ops.log(1 + ops.exp((x * self.weight).sum(-1)))
        return rows.sum() / totals[0] + (rows * rows * positives).sum() / totals[1]


def test_several_losses_in_a_window_of_batches_by_totals_as_shared_inputs(pynative):
    """As the error about 'accumulation_steps' and several losses advises."""
    options = {"micro_size": 3, "accumulation_steps": 2, "reduction": "sum", "split": EvenSplit(shared=(2,))}
    step = make_step(Sums(), lambda weights: nn.SGD(weights, RATE), **options)
    parts = [data(positives, seed) for seed, positives in enumerate([POSITIVES, [0, 1, 1, 0, 1]])]
    x, mask = (np.concatenate(column) for column in zip(*parts, strict=True))
    totals = np.array([len(x), mask.sum()], np.float32)
    for part in parts:
        step(*tensors(part), Tensor(totals))
    rows, slopes = np.log(1 + np.exp(x @ START)), 1 / (1 + np.exp(-(x @ START)))
    expected = slopes @ x / totals[0] + (2 * rows * slopes * mask) @ x / totals[1]
    np.testing.assert_allclose(gradient(step), expected, rtol=1e-4, atol=1e-5)
