"""What a count, a loss and several losses can be, and errors. What they mean: options/test_setups.py. Ranks:
test_counted_ranks.py."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import CountClassWeights, CountMask, CountNotIgnored, GradAccumulationCell
from tests.support.reference import as_numpy, make_step
from tests.support.state import assert_identical, everything

START = np.linspace(-1, 1, 4)
RATE = 0.5


class Masked(nn.Cell):
    """The squared error of w x ~ 1: its mean over the samples that the mask keeps."""

    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor(START, ms.float32), name="weight")

    def construct(self, x, mask):
        return (ops.square((x * self.weight).sum(-1) - 1) * mask).sum() / mask.sum()


class Ratio(Masked):
    """The sum, and its count. If the mask keeps nothing, the sum and its gradient are NaN."""

    def construct(self, x, mask):
        count = mask.sum()
        # The count has a gradient, which must be ignored.
        return super().construct(x, mask) * count, count + (self.weight - ops.stop_gradient(self.weight)).sum()


def data(mask, seed=0):
    x = np.random.default_rng(seed).normal(size=(len(mask), 4)).astype(np.float32)
    return x, np.array(mask, np.float32)


def oracle(x, mask):
    """Loss and gradient of the whole batch at START."""
    error = x @ START - 1
    return (error**2 * mask).sum() / mask.sum(), (2 * error * mask) @ x / mask.sum()


def step_of(network, **options):
    return make_step(network, lambda weights: nn.Momentum(weights, RATE, 0.9), **options)


def gradient(step):
    """The gradient, from momentum's first update, which is the gradient times the rate."""
    return (START - as_numpy(step.weights[0])) / RATE


UNEVEN = [1, 1, 0, 0.5, 1, 0, 0, 0]


@pytest.mark.parametrize("count", [lambda x, mask: x.shape[0] / 2, lambda x, mask: mask.asnumpy().sum()])
def test_a_count_may_return_a_number(count, pynative):
    """If the mask keeps all samples, half their number and the mask's sum give the same weights."""
    x, mask = data([1] * 8)
    step = step_of(Masked(), count=count, micro_size=3)
    step(Tensor(x), Tensor(mask))
    np.testing.assert_allclose(gradient(step), oracle(x, mask)[1], rtol=1e-4, atol=1e-5)
    assert float(step.window_count.asnumpy()) == count(x, Tensor(mask))


@pytest.mark.parametrize(
    ("count", "error", "words"),
    [
        (lambda x, mask: None, TypeError, r"a number or a Tensor of shape .*but got None"),
        (lambda x, mask: mask, ValueError, r"a scalar of shape \(\), but got shape \(8,\)"),
    ],
)
def test_a_count_that_is_no_number_is_refused(count, error, words, pynative):
    step = step_of(Masked(), micro_size=1, count=count)
    with pytest.raises(error, match=f"'count' must return {words}"):
        step(*map(Tensor, data(UNEVEN)))
    np.testing.assert_array_equal(as_numpy(step.weights[0]), START.astype(np.float32))


TWO, RATIO = {"loss_weights": (1.0, 2.0)}, {"reduction": "ratio"}


class Returning(Masked):
    """Returns what `made` makes of its loss."""

    def __init__(self, made):
        super().__init__()
        self.made = made

    def construct(self, x, mask):
        return self.made(super().construct(x, mask))


@pytest.mark.parametrize(
    ("made", "options", "error", "words"),
    [
        (lambda loss: {"loss": loss}, {}, TypeError, "the network must return .*, but got a dict"),
        (lambda loss: 1.5, {}, TypeError, "the network must return .*, but got a number"),
        (lambda loss: loss.astype(ms.int32), {}, TypeError, "the network must return .*, but got Int32"),
        (lambda loss: loss, TWO, ValueError, r"must return 2 loss\(es\), by 'count' and 'loss_weights', but got"),
        (lambda loss: loss, RATIO, ValueError, r"return \(numerator, denominator\).* a tuple, but got 1 output"),
        (lambda loss: (loss, loss.reshape((1,))), RATIO, ValueError, r"but got shape \(\) and shape \(1,\). Sum"),
    ],
)
def test_what_is_no_loss_is_refused(made, options, error, words, pynative):
    step = step_of(Returning(made), micro_size=2, **options)
    with pytest.raises(error, match=f"For 'GradAccumulationCell', .*{words}"):
        step(*map(Tensor, data([1, 1])))
    np.testing.assert_array_equal(as_numpy(step.weights[0]), START.astype(np.float32))


@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        (Masked, {"count": CountMask()}, r"'count' must return a finite number .* but got \[\[2.0, .*Nothing was"),
        (Ratio, RATIO, r"the network must return a denominator .* Nothing was ch"),
    ],
)
def test_a_bad_count_is_an_error_and_changes_nothing(network, options, message, pynative):
    x, mask = data(UNEVEN)
    step = step_of(network(), micro_size=3, **options)
    step(Tensor(x), Tensor(mask))
    before = everything(step)
    with pytest.raises(ValueError, match=message):
        step(Tensor(x), Tensor([1.0, 1, 0, -1, 0, 0, 1, 1]))
    assert_identical(everything(step), before, but=("gaccum_ms.window_count", "gaccum_ms.batch_count"))
    step(Tensor(x), Tensor(mask))
    assert (as_numpy(step.weights[0]) != before["weight"]).all()


def test_a_bad_denominator_spoils_its_window_alone(pynative):
    x, mask = map(Tensor, data([1, 0.5, 1, 1, 0]))
    step = step_of(Ratio(), micro_size=2, accumulation_steps=2, reduction="ratio")
    before = as_numpy(step.weights[0])
    with pytest.raises(ValueError, match="The window that the batch is in does not update"):
        step(x, Tensor([1.0, 1, 1, -1, 0]))
    step(x, mask)
    np.testing.assert_array_equal(as_numpy(step.weights[0]), before)
    assert (int(step.window_position.asnumpy()), int(step.update_count.asnumpy())) == (0, 0)
    step(x, mask)
    step(x, mask)
    np.testing.assert_allclose(gradient(step), oracle(x.asnumpy(), mask.asnumpy())[1], rtol=1e-4, atol=1e-5)


def test_one_loss_may_have_a_weight(pynative):
    x, mask = data(UNEVEN)
    step = step_of(Masked(), micro_size=3, count=CountMask(), loss_weights=(0.5,))
    loss = step(Tensor(x), Tensor(mask))
    expected, expected_gradient = oracle(x, mask)
    np.testing.assert_allclose(loss.asnumpy(), expected / 2, rtol=1e-5)
    np.testing.assert_allclose(gradient(step), expected_gradient / 2, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"count": 3}, TypeError, "'count' must be a function or Cell .* but got 3"),
        ({"count": (CountMask(), "x")}, TypeError, "'count' must be a function or Cell .* but got 'x'"),
        ({"count": (), "loss_weights": (1.0,)}, ValueError, r"one entry for each loss, but got count=\(\)"),
        ({"loss_weights": 1.0}, TypeError, "'loss_weights' must be a sequence of floats, but got 1.0"),
        ({"loss_weights": (1.0, float("nan"))}, ValueError, "'loss_weights' must be finite"),
        ({"loss_weights": ()}, ValueError, r"'loss_weights' must be finite, one for each loss, but got \(\)"),
        ({"reduction": "max"}, ValueError, r"'reduction' must be one of \['mean', 'sum', 'ratio'\], but got 'max'"),
        ({"overflow": None}, ValueError, "'overflow' must be one of .* but got None"),
        ({"overflow": "drop_micro_batch", "reduction": "sum"}, ValueError, "reduction='sum' and count=None. Give"),
    ],
)
def test_refuses_bad_options(options, error, message):
    with pytest.raises(error, match=f"For 'GradAccumulationCell', .*{message}"):
        GradAccumulationCell(Masked(), 2, **options)


def test_count_not_ignored_is_cross_entropys_own_divisor(pynative):
    logits, labels = Tensor(np.random.default_rng(1).normal(size=(4, 3)), ms.float32), Tensor([0, 2, -100, 1], ms.int32)
    mean, total = (float(nn.CrossEntropyLoss(reduction=word)(logits, labels)) for word in ("mean", "sum"))
    assert float(CountNotIgnored()(logits, labels)) == 3 == pytest.approx(total / mean)


def test_counts_of_labels_leave_out_what_the_loss_leaves_out(pynative):
    labels = Tensor(np.array([[2, 0, -100, 1], [-100, 2, 2, -100]]), ms.int32)
    weight = Tensor([1.0, 5.0, 20.0])
    other = Tensor(np.ones((2, 1)), ms.float32)
    assert float(CountMask()(other, Tensor([[0.5, 0], [2, 0]]))) == 2.5
    assert float(CountNotIgnored()(other, labels)) == 5
    assert float(CountNotIgnored(2, position=0, shift=1)(labels, other)) == 4
    assert float(CountClassWeights(weight)(other, labels)) == 66
    assert float(CountClassWeights(weight, 1, 0, shift=2)(Tensor([[0, 0, 1, 2], [1, 1, 0, 1]]), other)) == 21


def test_counts_of_labels_refuse_bad_arguments():
    for count, argument, error, words in (
        (CountNotIgnored, {"shift": -1}, ValueError, "'shift' must be at least 0, but got -1"),
        (CountNotIgnored, {"shift": 1.0}, TypeError, "'shift' must be an int"),
        (CountClassWeights, {"weight": [1.0]}, TypeError, "'weight' must be a Tensor, but got a list"),
        (CountClassWeights, {"weight": Tensor([[1.0]])}, ValueError, r"must have shape \(C,\).* got shape \(1, 1\)"),
    ):
        with pytest.raises(error, match=words):
            count(**argument)
