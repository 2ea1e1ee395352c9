"""Loss scales of MindSpore's managers, overflows, and bad scales. In windows, and micro-batches that are dropped:
options/test_setups.py. Ranks: test_counted_ranks.py."""

from __future__ import annotations

import functools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.amp import DynamicLossScaleManager, FixedLossScaleManager

from gaccum_ms import GradAccumulationCell
from tests.support.modes import eagerly
from tests.support.reference import OPTIMIZERS, Regression, as_numpy, batches, make_step, relative_error
from tests.support.reuse import Reused
from tests.support.state import everything, manager

SAMPLES, MICRO_SIZE = 13, 3  # 5 + 5 + 3
DATA = [(x, y.astype(np.float32)) for x, y in batches(SAMPLES, 3)]


def step_of(scale_sense=None):
    return make_step(Regression(), OPTIMIZERS["momentum"], scale_sense, micro_size=MICRO_SIZE)


@Reused
def reused_step():
    return step_of(manager())


def good():
    return [Tensor(value) for value in DATA[0]]


def poisoned(sample, value):
    x, y = DATA[0]
    x = x.copy()
    x[sample, 0] = value
    return [Tensor(x), Tensor(y)]


# -- without overflow the scale changes nothing ------------------------------------------------------------------------


@functools.cache
@eagerly()
def whole_batches():
    """The reference: MindSpore's own step."""
    network = Regression()
    step = nn.TrainOneStepCell(network, OPTIMIZERS["momentum"](network.trainable_params())).set_train()
    for batch in DATA:
        step(*map(Tensor, batch))
    return {weight.name: as_numpy(weight) for weight in network.trainable_params()}


@pytest.mark.parametrize("fixed", [False, True])
def test_loss_scale_managers_equal_the_whole_batch(fixed, pynative):
    """With ``drop_overflow_update=False`` nothing checks for overflows, as in MindSpore's own step."""
    network = Regression()
    scale = 512.0 if fixed else 1.0  # that the optimizer removes
    optimizer = nn.Momentum(network.trainable_params(), 0.05, 0.9, weight_decay=0.01, loss_scale=scale)
    cell = GradAccumulationCell(network, MICRO_SIZE, max_grad_norm=1e6)
    if fixed:
        fixed_manager = FixedLossScaleManager(512.0, drop_overflow_update=False)
        step = ms.amp.build_train_network(cell, optimizer, loss_scale_manager=fixed_manager)
    else:
        step = ms.Model(cell, None, optimizer, loss_scale_manager=DynamicLossScaleManager(512, 2, 1000)).train_network
    for batch in DATA:
        step(*map(Tensor, batch))
    errors = [relative_error(as_numpy(weight), whole_batches()[weight.name]) for weight in network.trainable_params()]
    assert max(errors) < 1e-5
    assert 0 < as_numpy(step.grad_norm) < 10
    step(*poisoned(7, np.nan))
    assert np.isnan(as_numpy(network.out)).any() == fixed


def twice_the_samples(x, y):
    """Any multiple of the samples gives the same mean."""
    return Tensor(2.0 * x.shape[0], ms.float32)


def test_clipping_under_a_scale_that_the_optimizer_removes(pynative):
    weights = []
    for scale in (1.0, 512.0):
        network = Regression()
        optimizer = nn.Momentum(network.trainable_params(), 0.05, 0.9, loss_scale=scale)
        cell = GradAccumulationCell(network, MICRO_SIZE, max_grad_norm=0.1, count=twice_the_samples)
        fixed = FixedLossScaleManager(scale, drop_overflow_update=False)
        step = ms.amp.build_train_network(cell, optimizer, loss_scale_manager=fixed)
        step(*good())
        weights.append(np.append(as_numpy(network.out), as_numpy(step.grad_norm)))
    assert relative_error(*weights) < 1e-5


# -- overflow: drop the window -----------------------------------------------------------------------------------------


@pytest.mark.device(
    "an overflow in any micro-batch drops the window, and halves the loss scale", ran="an H100, 2026-11-27"
)
@pytest.mark.parametrize(("sample", "value"), [(0, np.inf), (12, np.nan)], ids=["first", "last"])
def test_an_overflow_drops_the_window_exactly(sample, value):
    """Weights, optimizer state and its step counter bit-identical, accumulators cleared, the scale halved once."""
    step = reused_step()
    step(*good())
    before = everything(step)
    _, overflow, scale = step(*poisoned(sample, value))
    after = everything(step)
    assert overflow.asnumpy()
    assert float(scale.asnumpy()) == 1024.0
    assert after.pop("gaccum_ms.scale_sense") == before.pop("gaccum_ms.scale_sense") / 2 == 512.0
    assert after.pop("gaccum_ms.batch_count") == before.pop("gaccum_ms.batch_count") + 1
    for name in before:
        if not name.endswith(("current_iterator_step", "last_overflow_iterator_step")):
            np.testing.assert_array_equal(after[name], before[name], name)
    _, overflow, scale = step(*good())
    assert not overflow.asnumpy()
    assert float(scale.asnumpy()) == 512.0
    assert (everything(step)["out"] != after["out"]).any()


def test_set_sense_scale_reaches_the_compiled_graph():
    step = reused_step()
    for scale in (8.0, 16.0):
        step.set_sense_scale(Tensor(scale, ms.float32))
        assert float(step(*good())[2].asnumpy()) == scale


def test_without_a_scale_nobody_asks(pynative):
    """As in nn.TrainOneStepCell, a NaN reaches the weights."""
    step = step_of()
    step(*poisoned(7, np.nan))
    assert np.isnan(as_numpy(step.weights[0])).any()


class MeanOf(nn.Cell):
    """The mean of a function of the weight times x."""

    def __init__(self, function):
        super().__init__()
        self.weight = ms.Parameter(Tensor(1.0, ms.float32), name="weight")
        self.function = function

    def construct(self, x):
        return self.function(self.weight * x).mean()


def test_a_micro_batch_is_left_out_whose_loss_is_finite_and_whose_gradient_is_not(pynative):
    """For x = 1, 0, 4, the gradients are 1/2, 0/0 and 1."""
    step = make_step(MeanOf(ops.sqrt), micro_size=3, overflow="drop_micro_batch")
    assert float(step(Tensor([1.0, 0.0, 4.0]))) == pytest.approx(1.5)
    assert as_numpy(step.weights[0]) == pytest.approx(1 - 0.1 * 0.75)
    assert float(step.dropped_micro_batches.asnumpy()) == 1


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_refuses_bad_scales():
    for scale_sense, error, message in (
        (1024.0, TypeError, r"must be a Cell or a Tensor, but got 1024.0 of type 'float'. Give mindspore.Tensor\("),
        (DynamicLossScaleManager(), TypeError, r"of type 'DynamicLossScaleManager'.* get_update_cell\(\)"),
        (Tensor([1.0, 2.0], ms.float32), ValueError, r"shape of 'scale_sense' must be \(\) or \(1,\), but got \(2,\)"),
        (Tensor(0.0, ms.float32), ValueError, "'scale_sense' must be positive and finite, but got 0.0"),
    ):
        with pytest.raises(error, match=message):
            step_of(scale_sense)
    with pytest.raises(ValueError, match=r"'scale_sense' must be positive and finite, but got 0.0"):
        step_of(Tensor(1.0, ms.float32)).set_sense_scale(Tensor(0.0, ms.float32))
    for step, scale in ((step_of(), Tensor(1.0)), (step_of(manager()), 2.0), (step_of(manager()), Tensor([1.0]))):
        with pytest.raises(TypeError, match="'set_sense_scale' needs that 'scale_sense' was given"):
            step.set_sense_scale(scale)


# -- late overflows ----------------------------------------------------------------------------------------------------


def five_billion(x):
    return ops.full((), 5e9, dtype=ms.float32)


def test_an_infinite_divisor_is_an_overflow_though_the_gradient_that_it_divides_is_finite(pynative):
    """The total count of 1e10 times the scale of 1e30 exceeds float32. The gradient of 1e-6 times both does not;
    divided by infinity it would be zero, and would make an update."""
    options = {"micro_size": 2, "count": five_billion, "max_grad_norm": 1.0}
    step = make_step(MeanOf(nn.Identity()), scale_sense=Tensor(1e30, ms.float32), **options)
    _, overflow, _ = step(Tensor([1e-6, 1e-6], ms.float32))
    assert overflow.asnumpy()
    assert int(step.update_count.asnumpy()) == 0
    assert as_numpy(step.weights[0]) == 1.0
