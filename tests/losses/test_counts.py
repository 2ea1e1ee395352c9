"""Counts, sums and several losses on one process, against NumPy. Ranks: test_counted_ranks.py."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import (
    Accumulators,
    CountClassWeights,
    CountMask,
    CountNotIgnored,
    GradAccumulationCell,
)
from tests.support.reference import as_numpy, make_step
from tests.support.reuse import Reused
from tests.support.state import assert_identical, everything

COUNT_MASK = CountMask()
START = np.linspace(-1, 1, 4)
RATE = 0.5


class Masked(nn.Cell):
    """The squared error of w x ~ 1: its mean over the samples that the mask keeps, or its sum."""

    def __init__(self, reduction="mean"):
        super().__init__()
        self.weight = ms.Parameter(Tensor(START, ms.float32), name="weight")
        self.reduction = reduction

    def errors(self, x):
        return (x * self.weight).sum(-1) - 1

    def construct(self, x, mask):
        total = (ops.square(self.errors(x)) * mask).sum()
        return total / mask.sum() if self.reduction == "mean" else total


class Ratio(nn.Cell):
    """The sum of the squared errors of w x ~ 1 over what the mask keeps, and its count. If the mask keeps nothing, the
    sum and its gradient are NaN."""

    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor(START, ms.float32), name="weight")

    def construct(self, x, mask):
        count = mask.sum()
        total = (ops.square((x * self.weight).sum(-1) - 1) * mask).sum()
        # The count has a gradient, which must be ignored.
        return total / count * count, count + (self.weight - ops.stop_gradient(self.weight)).sum()


class MaskedAndMean(Masked):
    """The masked mean, and the mean error of all samples, without the mask."""

    def construct(self, x, mask):
        errors = self.errors(x)
        return (ops.square(errors) * mask).sum() / mask.sum(), errors.mean()


def data(mask, seed=0):
    x = np.random.default_rng(seed).normal(size=(len(mask), 4)).astype(np.float32)
    return x, np.array(mask, np.float32)


def oracle(x, mask, divisor=None):
    """Loss and gradient of the whole batch at START."""
    error = x @ START - 1
    divisor = divisor or mask.sum()
    return (error**2 * mask).sum() / divisor, (2 * error * mask) @ x / divisor


def mean_oracle(x):
    return (x @ START - 1).mean(), x.mean(axis=0)


def step_of(network, **options):
    """A step of `network` , which is a Cell or its class."""
    network = network() if isinstance(network, type) else network
    return make_step(network, lambda weights: nn.Momentum(weights, RATE, 0.9), **options)


steps = Reused(step_of)


def gradient(step):
    """The gradient, from momentum's first update, which is the gradient times the rate."""
    return (START - as_numpy(step.weights[0])) / RATE


UNEVEN = [1, 1, 0, 0.5, 1, 0, 0, 0]


COUNTED, AS_RATIO = (Masked, {"count": COUNT_MASK}), (Ratio, {"reduction": "ratio"})


@pytest.mark.parametrize(("mode", "micro_size"), [("graph", 3), ("pynative", 8), ("pynative", 1)], indirect=["mode"])
@pytest.mark.parametrize("way", [COUNTED, AS_RATIO], ids=["count", "ratio"])
def test_unequal_counts_equal_the_whole_batch(way, micro_size, mode):
    """Micro-batches of UNEVEN have counts down to 0, where the network's mean is NaN."""
    network, options = way
    x, mask = data(UNEVEN)
    step = steps(network, micro_size=micro_size, **options)
    loss = step(Tensor(x), Tensor(mask))
    expected, expected_gradient = oracle(x, mask)
    np.testing.assert_allclose(loss.asnumpy(), expected, rtol=1e-5)
    np.testing.assert_allclose(gradient(step), expected_gradient, rtol=1e-4, atol=1e-5)
    assert float(step.window_count.asnumpy()) == 3.5
    assert not any(as_numpy(a).any() for a in step.accu_grads)


def rows(x, mask):
    return x.shape[0]


def half_rows(x, mask):
    return x.shape[0] / 2


def in_numpy(x, mask):
    return mask.asnumpy().sum()


@pytest.mark.parametrize(
    ("count", "window", "mode"),
    [
        (half_rows, {"accumulation_steps": 2}, "pynative"),
        (half_rows, {"overflow": "drop_micro_batch"}, "pynative"),
        (rows, {}, "pynative"),
        (lambda x, mask: mask.sum(), {}, "pynative"),
        (in_numpy, {}, "pynative"),  # a graph cannot call NumPy
    ],
    indirect=["mode"],
)
def test_a_count_is_a_function_and_may_return_a_number(count, window, mode):
    """If the mask keeps all samples, their number, half of it and the mask's sum give the same weights."""
    batches = window.get("accumulation_steps", 1)
    x, mask = data([1] * 8 * batches)
    step = step_of(Masked(), count=count, micro_size=3, **window)
    for part in range(batches):
        step(Tensor(x[part * 8 :][:8]), Tensor(mask[:8]))
    np.testing.assert_allclose(gradient(step), oracle(x, mask)[1], rtol=1e-4, atol=1e-5)
    assert float(step.window_count.asnumpy()) == 8.0 * batches / (2 if count is half_rows else 1)


def test_each_of_several_losses_may_count_a_number(pynative):
    x, mask = data([1] * 8)
    step = step_of(MaskedAndMean(), micro_size=3, count=(half_rows, rows))
    step(Tensor(x), Tensor(mask))
    np.testing.assert_allclose(gradient(step), oracle(x, mask)[1] + mean_oracle(x)[1], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(step.window_count.asnumpy(), [4.0, 8.0])


@pytest.mark.parametrize(
    ("count", "error", "words"),
    [
        (lambda x, mask: x.shape, TypeError, r"a number or a Tensor of shape .*but got Tuple"),
        (lambda x, mask: None, TypeError, r"a number or a Tensor of shape .*but got None"),
        (lambda x, mask: mask, ValueError, r"a scalar of shape \(\), but got shape \(8,\)"),
        (lambda x, mask: mask.sum(keepdims=True), ValueError, r"a scalar of shape \(\), but got shape \(1,\)"),
    ],
)
def test_a_count_that_is_no_number_is_refused(count, error, words, pynative):
    step = step_of(Masked(), micro_size=1, count=count)
    with pytest.raises(error, match=f"'count' must return {words}"):
        step(*map(Tensor, data(UNEVEN)))
    np.testing.assert_array_equal(as_numpy(step.weights[0]), START.astype(np.float32))


class Returning(Masked):
    """Returns what `made` makes of its loss."""

    def __init__(self, made):
        super().__init__()
        self.made = made

    def construct(self, x, mask):
        return self.made(super().construct(x, mask))


RETURNED = {
    "a dict": lambda loss: {"loss": loss},
    "None": lambda loss: None,
    "a number": lambda loss: 1.5,
    "a str": lambda loss: "loss",
    "a tuple": lambda loss: (loss, (loss, loss)),
    "Int32": lambda loss: ops.cast(loss, ms.int32),
}


@pytest.mark.parametrize("kind", RETURNED)
def test_what_is_no_loss_is_refused(kind, pynative):
    step = step_of(Returning(RETURNED[kind]), micro_size=2)
    before = as_numpy(step.weights[0])
    with pytest.raises(TypeError, match=f"For 'GradAccumulationCell', the network must return .*, but got {kind}"):
        step(*map(Tensor, data([1, 1])))
    np.testing.assert_array_equal(as_numpy(step.weights[0]), before)


@pytest.mark.filterwarnings("ignore:.*a window counted nothing")
@pytest.mark.parametrize("way", [COUNTED, AS_RATIO], ids=["count", "ratio"])
def test_a_window_that_counts_nothing_does_not_update(way):
    network, options = way
    x, mask = data(UNEVEN)
    step = steps(network, micro_size=3, **options)
    step(Tensor(x), Tensor(mask))
    before = everything(step)
    loss = step(Tensor(x), ops.zeros(8))
    assert float(loss.asnumpy()) == 0.0
    after = everything(step)
    assert after.pop("gaccum_ms.window_count") == 0 != before.pop("gaccum_ms.window_count")
    assert after.pop("gaccum_ms.batch_count") == before.pop("gaccum_ms.batch_count") + 1
    assert_identical(after, before)


BAD_COUNT = r"'count' must return a finite number .* but got \[\[2.0, .*Nothing was"
BAD_DENOMINATOR = r"reduction='ratio' the network must return a denominator .* Nothing was ch"


@pytest.mark.parametrize(
    ("way", "bad", "mode", "message"),
    [
        (COUNTED, -1.0, "graph", BAD_COUNT),
        (COUNTED, float("nan"), "graph", BAD_COUNT),
        (COUNTED, float("inf"), "pynative", BAD_COUNT),
        (AS_RATIO, float("nan"), "graph", BAD_DENOMINATOR),
        (AS_RATIO, -1.0, "pynative", BAD_DENOMINATOR),
    ],
    indirect=["mode"],
)
def test_a_bad_count_is_an_error_and_changes_nothing(way, bad, mode, message):
    network, options = way
    x, mask = data(UNEVEN)
    step = steps(network, micro_size=3, **options)
    step(Tensor(x), Tensor(mask))
    before = everything(step)
    with pytest.raises(ValueError, match=message):
        step(Tensor(x), Tensor(np.array([1, 1, 0, bad, 0, 0, 1, 1], np.float32)))
    assert_identical(everything(step), before, but=("gaccum_ms.window_count", "gaccum_ms.batch_count"))
    step(Tensor(x), Tensor(mask))
    assert (as_numpy(step.weights[0]) != before["weight"]).all()


class Half(nn.Cell):
    """2,000 tokens for each sample, in float16, with gradients near 1."""

    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor(START, ms.float16), name="weight")

    def construct(self, x, mask):
        total = ((x.astype(ms.float16) * self.weight).astype(ms.float32).sum(-1) * mask).sum()
        return total / mask.sum()


def test_counted_gradients_are_as_small_as_the_whole_batchs_in_low_precision(pynative):
    """With counts as seeds, gradients of 4 x 2,000 tokens at scale 1,024 would be 8 million: too much for float16."""
    x = np.random.default_rng(0).normal(size=(4, 2000, 4)).astype(np.float32) + 1
    options = {"micro_size": 2, "count": CountMask(), "accumulators": Accumulators(ms.float16)}
    step = make_step(Half(), lambda weights: nn.SGD(weights, 0.25), Tensor(1024.0, ms.float32), **options)
    _, overflow, _ = step(Tensor(x), Tensor(np.ones((4, 2000), np.float32)))
    assert not overflow.asnumpy()
    np.testing.assert_allclose((START - as_numpy(step.weights[0])) / 0.25, x.mean(axis=(0, 1)), rtol=1e-2)


@pytest.mark.parametrize("counted", [False, True])
def test_losses_that_are_sums(counted, pynative):
    """A sum stays the whole batch's sum; with a count it is divided by the total."""
    x, mask = data(UNEVEN)
    step = step_of(Masked("sum"), micro_size=3, reduction="sum", count=CountMask() if counted else None)
    loss = step(Tensor(x), Tensor(mask))
    expected, expected_gradient = oracle(x, mask, divisor=None if counted else 1.0)
    np.testing.assert_allclose(loss.asnumpy(), expected, rtol=1e-5)
    np.testing.assert_allclose(gradient(step), expected_gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.core(mode="pynative")
@pytest.mark.parametrize(("mode", "micro_size"), [("graph", 8), ("pynative", 8), ("pynative", 3)], indirect=["mode"])
def test_each_of_several_losses_has_its_own_total(micro_size, mode):
    """With UNEVEN in eight micro-batches the masked loss is NaN in four: only the other loss has a gradient there."""
    x, mask = data(UNEVEN)
    step = step_of(MaskedAndMean(), micro_size=micro_size, count=(CountMask(), None), loss_weights=(1.0, 0.25))
    loss = step(Tensor(x), Tensor(mask))
    (masked, masked_gradient), (mean, mean_gradient) = oracle(x, mask), mean_oracle(x)
    np.testing.assert_allclose(loss.asnumpy(), masked + 0.25 * mean, rtol=1e-5)
    np.testing.assert_allclose(gradient(step), masked_gradient + 0.25 * mean_gradient, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(step.loss_terms.asnumpy(), [masked, mean], rtol=1e-5)
    assert step.window_count.asnumpy().tolist() == [3.5, 8.0]


def test_one_loss_may_have_a_weight(pynative):
    x, mask = data(UNEVEN)
    step = step_of(Masked(), micro_size=3, count=CountMask(), loss_weights=(0.5,))
    loss = step(Tensor(x), Tensor(mask))
    expected, expected_gradient = oracle(x, mask)
    np.testing.assert_allclose(loss.asnumpy(), expected / 2, rtol=1e-5)
    np.testing.assert_allclose(gradient(step), expected_gradient / 2, rtol=1e-4, atol=1e-5)


def test_the_number_of_losses_must_be_what_the_options_say(pynative):
    x, mask = data(UNEVEN)
    for network, options in ((MaskedAndMean(), {}), (Masked(), {"loss_weights": (1.0, 2.0)})):
        step = step_of(network, micro_size=2, **options)
        with pytest.raises(ValueError, match=r"must return \d loss\(es\), by 'count' and 'loss_weights', but got"):
            step(Tensor(x), Tensor(mask))
        np.testing.assert_array_equal(as_numpy(step.weights[0]), START.astype(np.float32))


@pytest.mark.parametrize("ignore_index", [-100, 2])
def test_count_not_ignored_is_cross_entropys_own_divisor(ignore_index, pynative):
    labels = np.array([0, 2, -100 if ignore_index == -100 else 2, 1], np.int32)
    logits = Tensor(np.random.default_rng(1).normal(size=(4, 3)), ms.float32)
    mean, total = (
        nn.CrossEntropyLoss(reduction=reduction, ignore_index=ignore_index)(logits, Tensor(labels)).asnumpy()
        for reduction in ("mean", "sum")
    )
    count = CountNotIgnored(ignore_index)(logits, Tensor(labels)).asnumpy()
    np.testing.assert_allclose(total / count, mean, rtol=1e-6)
    assert count == {-100: 3, 2: 2}[ignore_index]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"count": 3}, TypeError, "'count' must be a function or Cell .* but got 3"),
        ({"count": (CountMask(), "x")}, TypeError, "'count' must be a function or Cell .* but got 'x'"),
        ({"loss_weights": 1.0}, TypeError, "'loss_weights' must be a sequence of floats, but got 1.0"),
        ({"loss_weights": (1.0, True)}, TypeError, "'loss_weights' must be a sequence of floats"),
        ({"loss_weights": (1.0, float("nan"))}, ValueError, "'loss_weights' must be finite"),
        ({"loss_weights": ()}, ValueError, r"'loss_weights' must be finite, one for each loss, but got \(\)"),
        ({"count": (None, None), "loss_weights": (1.0,)}, ValueError, r"2 count\(s\) and 1 weight\(s\)"),
        ({"reduction": "max"}, ValueError, r"'reduction' must be one of \['mean', 'sum', 'ratio'\], but got 'max'"),
        ({"overflow": None}, ValueError, "'overflow' must be one of .* but got None"),
        (
            {"reduction": "sum", "loss_weights": (1.0, 1.0)},
            ValueError,
            "needs a 'count' for each loss, but got count=N",
        ),
        ({"reduction": "sum", "loss_weights": (0.5,)}, ValueError, "needs a 'count' for each loss, but got count=None"),
        ({"overflow": "drop_micro_batch", "loss_weights": (1.0, 1.0)}, ValueError, r"2 loss\(es\)"),
        ({"overflow": "drop_micro_batch", "reduction": "sum"}, ValueError, "reduction='sum' and count=None"),
    ],
)
def test_refuses_bad_options(options, error, message):
    with pytest.raises(error, match=f"For 'GradAccumulationCell', .*{message}"):
        GradAccumulationCell(Masked(), 2, **options)


def test_counts_of_labels_leave_out_what_the_loss_leaves_out(pynative):
    labels = Tensor(np.array([[2, 0, -100, 1], [-100, 2, 2, -100]]), ms.int32)
    weight = Tensor([1.0, 5.0, 20.0])
    other = Tensor(np.ones((2, 1)), ms.float32)
    assert float(CountNotIgnored()(other, labels)) == 5
    assert float(CountNotIgnored(2, position=0, shift=1)(labels, other)) == 4
    assert float(CountClassWeights(weight)(other, labels)) == 66
    assert float(CountClassWeights(weight, 1, 0, shift=2)(Tensor([[0, 0, 1, 2], [1, 1, 0, 1]]), other)) == 21


def test_counts_of_labels_refuse_bad_arguments():
    with pytest.raises(ValueError, match="'shift' must be at least 0, but got -1"):
        CountNotIgnored(shift=-1)
    with pytest.raises(TypeError, match="'shift' must be an int"):
        CountNotIgnored(shift=1.0)
    with pytest.raises(TypeError, match="'weight' must be a Tensor, but got a list"):
        CountClassWeights([1.0])
    with pytest.raises(ValueError, match=r"must have shape \(C,\).*but got shape \(1, 1\)"):
        CountClassWeights(Tensor([[1.0]]))


class InfiniteMean(MaskedAndMean):
    """An input may make the mean infinite."""

    def construct(self, x, mask, add):
        masked, mean = super().construct(x, mask)
        return masked, mean + add.sum()


def test_an_infinite_loss_leaves_the_others_of_its_micro_batch(pynative):
    """In the micro-batches where the masked loss counts nothing, the other one is infinite."""
    x, mask = data(UNEVEN)
    add = np.where(mask == 0, np.inf, 0).astype(np.float32)
    step = step_of(InfiniteMean(), micro_size=len(x), count=(CountMask(1), None), loss_weights=(1.0, 0.25))
    step(*map(Tensor, (x, mask, add)))
    masked, mean = step.loss_terms.asnumpy()
    np.testing.assert_allclose(masked, oracle(x, mask)[0], rtol=1e-5)
    assert mean == np.inf
