"""Learning rates against hand calculations, also in trained weights: gradients are 1, so weights add up the rates."""

from __future__ import annotations

import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

from gaccum_ms.learning_rate import current_learning_rate, multiply_learning_rate, scale_learning_rate, scaling_factor
from tests.support.modes import MODES
from tests.support.reference import as_numpy, make_step, vector
from tests.support.state import assert_identical, everything

ONE = Tensor([1.0], ms.float32)
RATES = [0.5, 0.5, 1.0, 1.0, 0.25, 0.25]
BASES = {
    "number": lambda: 0.5,
    "list": lambda: RATES,
    "schedule": lambda: nn.CosineDecayLR(0.0, 1.0, 4),  # 1, (2 + sqrt 2) / 4, 1 / 2, (2 - sqrt 2) / 4, 0, 0
}

# The rates of six updates with factor 4. A warm-up of 4 updates multiplies by 1, 1.75, 2.5, 3.25, 4, 4 under the linear
# rule, by 1, 1.25, 1.5, 1.75, 2, 2 under the other.
BY_HAND = {
    ("number", "linear", 0): [2.0, 2.0, 2.0, 2.0, 2.0, 2.0],
    ("number", "sqrt", 4): [0.5, 0.625, 0.75, 0.875, 1.0, 1.0],
    ("list", "linear", 4): [0.5, 0.875, 2.5, 3.25, 1.0, 1.0],
    ("list", "sqrt", 0): [1.0, 1.0, 2.0, 2.0, 0.5, 0.5],
    ("schedule", "linear", 4): [1.0, 1.493718, 1.25, 0.475951, 0.0, 0.0],
    ("schedule", "sqrt", 0): [2.0, 1.707107, 1.0, 0.292893, 0.0, 0.0],
}


class Sum(nn.Cell):
    """The sum of three weights, which start at 0: the gradient of each is 1."""

    def __init__(self):
        super().__init__()
        for name in "abc":
            setattr(self, name, ms.Parameter(ops.zeros(1, ms.float32), name=name))

    def construct(self, x):
        return ((self.a + self.b + self.c) * x).mean()


def mindspores_step(make_optimizer):
    network = Sum()
    return nn.TrainOneStepCell(network, make_optimizer(network)).set_train()


def sgd(rate):
    return lambda network: nn.SGD(network.trainable_params(), rate)


def grouped(*rates, default=0.5):
    """One group for each weight, with these rates."""

    def make(network):
        groups = [{"params": [weight]} for weight in (network.a, network.b, network.c)]
        for group, rate in zip(groups, rates, strict=False):
            group["lr"] = rate
        return nn.SGD(groups, default)

    return make


def scaled():
    return scale_learning_rate(0.5, 4, warmup_updates=4)


def updates(step, number=1):
    """The amount that each of the next updates subtracts from the three weights."""
    taken = []
    for _ in range(number):
        before = vector(step.weights)
        step(ONE)
        taken.append(before - vector(step.weights))
    return np.array(taken)


@pytest.mark.parametrize(("kind", "rule", "warmup_updates"), BY_HAND)
def test_rates_by_hand(kind, rule, warmup_updates, pynative):
    rate = scale_learning_rate(BASES[kind](), 4, rule, warmup_updates)
    expected = BY_HAND[kind, rule, warmup_updates]
    if kind == "list":
        assert (type(rate), rate) == (list, expected)
    elif kind == "number" and not warmup_updates:
        assert (type(rate), rate) == (float, expected[0])
    else:
        assert isinstance(rate, LearningRateSchedule)
        rates = [rate(Tensor(update, ms.int32)) for update in range(6)]
        np.testing.assert_allclose([value.asnumpy() for value in rates], expected, rtol=1e-6, atol=1e-6)


def test_rates_scaled_down_and_by_numpys_numbers():
    """A warm-up starts and ends exactly, though 1 + (s - 1) is not s in float32."""
    rate = scale_learning_rate(1.0, 1e-3, warmup_updates=3)
    assert (rate(Tensor(0)).asnumpy(), rate(Tensor(3)).asnumpy()) == (1.0, np.float32(1e-3))
    assert scale_learning_rate([1.0] * 4, 1e-3, warmup_updates=3)[3] == 1e-3
    assert scale_learning_rate(1, np.float32(0.25)) == 0.25
    assert scale_learning_rate(np.float64(1.0), 0.25, "sqrt") == 0.5
    assert scale_learning_rate(0, 3) == 0.0
    for rates in (tuple(RATES), np.array(RATES, np.float32), Tensor(RATES)):
        rate = scale_learning_rate(rates, 4, warmup_updates=4)
        assert rate == BY_HAND["list", "linear", 4] and all(type(one) is float for one in rate)
    assert (scaling_factor(9.0, "linear"), scaling_factor(9.0, "sqrt")) == (9.0, 3.0)


def test_groups_have_schedules_of_their_own_in_a_function_under_jit_too(pynative):
    """`ms.jit` refuses two Parameters of one name. MindSpore adds 1 to a plain number and subtracts it again, but our
    schedules do not."""
    network = Sum()
    cosine = nn.CosineDecayLR(0.0, 1.0, 4)
    rates = [
        scale_learning_rate(cosine, 4, "sqrt"),
        scale_learning_rate(cosine, 4),
        scale_learning_rate(1e-5, 1, "none", 1),
    ]
    optimizer = grouped(*rates)(network)

    @ms.jit
    def update(gradients):
        optimizer(gradients)
        return gradients

    for _ in range(2):
        update((ONE, ONE, ONE))
    got = [-as_numpy(weight)[0] for weight in network.trainable_params()]
    np.testing.assert_allclose(got, [sum(BY_HAND["schedule", "sqrt", 0][:2]), 4 + 3.414214, 2e-5], rtol=1e-6)


def test_updates_are_counted_and_not_batches(pynative):
    step = make_step(Sum(), lambda weights: nn.SGD(weights, scaled()), accumulation_steps=3)
    taken = updates(step, 9)[:, 0]
    assert taken.tolist() == [0.0, 0.0, 0.5, 0.0, 0.0, 0.875, 0.0, 0.0, 1.25]


# The optimizer's rates, and the expected rates of the three weights at its first three updates.
OPTIMIZERS = {
    "list": (lambda: sgd([0.5, 0.25, 1.0]), [[0.5] * 3, [0.25] * 3, [1.0] * 3]),
    "schedule_of_schedule": (lambda: sgd(scale_learning_rate(scaled(), 2)), [[1.0] * 3, [1.75] * 3, [2.5] * 3]),
    "mixed": (lambda: grouped(0.25, scaled()), [[0.25, 0.5, 0.5], [0.25, 0.875, 0.5], [0.25, 1.25, 0.5]]),
}


@pytest.mark.parametrize(("mode", "kind"), [("graph", "mixed"), *(("pynative", kind) for kind in OPTIMIZERS)])
def test_a_step_sees_a_multiplied_rate_and_the_current_rate_is_that_of_the_next_update(mode, kind):
    ms.set_context(mode=MODES[mode])
    make_optimizer, expected = OPTIMIZERS[kind]
    step = mindspores_step(make_optimizer())
    for rates, factor, total in zip(expected, (None, 4.0, 0.5), (1, 4, 2), strict=True):
        if factor is not None:
            before = everything(step)
            multiply_learning_rate(step.optimizer, factor)
            after = everything(step)
            changed = {name for name in before if (before[name] != after[name]).any()}
            assert changed and all("learning_rate" in name for name in changed)
        before = everything(step)
        rate = current_learning_rate(step.optimizer)
        assert_identical(before, everything(step))
        assert (type(rate), rate) == (float, rates[0] * total)
        np.testing.assert_array_equal(updates(step), [np.array(rates) * total])
    assert len(step.compile_cache) == (mode == "graph")


def test_the_current_rate_follows_the_order_of_parameters_and_a_list_that_ends(pynative):
    def make_optimizer(network):
        groups = [{"params": [network.a], "lr": 0.25}, {"params": [network.c, network.b]}]
        return nn.SGD([*groups, {"order_params": [network.c, network.a, network.b]}], 0.5)

    step = mindspores_step(make_optimizer)
    assert current_learning_rate(step.optimizer) == 0.5
    multiply_learning_rate(step.optimizer, 2.0)
    assert current_learning_rate(step.optimizer) == 1.0
    assert updates(step).tolist() == [[1.0, 0.5, 1.0]]
    step = mindspores_step(sgd([0.5, 0.25]))
    for rate in (0.5, 0.25):
        assert current_learning_rate(step.optimizer) == updates(step)[0, 0] == rate
    assert math.isnan(current_learning_rate(step.optimizer))


def test_an_optimizer_inside_another_has_the_rate():
    """LARS, which has no CPU kernel, has its own rate of 0."""
    inner = nn.Momentum(Sum().trainable_params(), 0.5, 0.9)
    outer = nn.LARS(inner)
    assert current_learning_rate(outer) == 0.5
    multiply_learning_rate(outer, 4.0)
    assert as_numpy(inner.learning_rate) == current_learning_rate(outer) == 2.0


def test_a_rate_that_cannot_be_multiplied_is_refused_and_nothing_changes(pynative):
    step = mindspores_step(grouped(0.25, scaled(), nn.CosineDecayLR(0.0, 1.0, 4)))
    before = everything(step)
    message = r"but got the schedule 'CosineDecayLR', .* Give the optimizer scale_learning_rate\(schedule, 1\)"
    with pytest.raises(ValueError, match=message):
        multiply_learning_rate(step.optimizer, 2.0)
    assert_identical(before, everything(step))
    multiply_learning_rate(sgd(scale_learning_rate(nn.CosineDecayLR(0.0, 1.0, 4), 1))(Sum()), 2.0)  # the remedy


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("0.1", 2), TypeError, "'learning_rate' must be a float, a list, .* but got '0.1' of type 'str'"),
        ((-0.1, 2), ValueError, "'learning_rate' must be finite and at least 0, but got -0.1"),
        (([], 2), ValueError, "'learning_rate' must have a rate for each update, but got none"),
        ((np.array([0.1, np.inf]), 2), ValueError, r"'learning_rate\[1\]' must be finite and at least 0, but got inf"),
        ((np.ones((2, 3)), 2), TypeError, r"'learning_rate\[0\]' must be a float, but got \[1.0, 1.0, 1.0\]"),
        ((0.1, True), TypeError, "'factor' must be a float, but got True of type 'bool'"),
        ((0.1, 2, "cubic"), ValueError, r"'rule' must be one of \['linear', 'sqrt', 'none'\], but got 'cubic'"),
        ((0.1, 2, "linear", -1), ValueError, "'warmup_updates' must be at least 0, but got -1"),
    ],
)
def test_refuses_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=f"^For 'scale_learning_rate', the argument {message}"):
        scale_learning_rate(*arguments)
