"""Loss scaling and overflow on one process. Ranks: test_counted_ranks.py."""

from __future__ import annotations

import functools

import mindspore as ms
import mindspore.amp
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.amp import DynamicLossScaleManager, FixedLossScaleManager

from gaccum_ms import GradAccumulationCell
from tests.support.modes import eagerly
from tests.support.reference import (
    OPTIMIZERS,
    Regression,
    Run,
    as_numpy,
    batches,
    make_step,
    relative_error,
)
from tests.support.reuse import Reused
from tests.support.state import everything, manager

SAMPLES, MICRO_SIZE = 13, 3  # 5 + 5 + 3
POISONED = {"first": 0, "middle": 7, "last": 12}


def data(number):
    return [(x, y.astype(np.float32)) for x, y in batches(SAMPLES, number)]


DATA = data(3)


def step_of(scale_sense=None, optimizer="momentum", **options):
    return make_step(Regression(), OPTIMIZERS[optimizer], scale_sense, micro_size=MICRO_SIZE, **options)


@Reused
def reused_step(scaled=True, optimizer="momentum", **options):
    return step_of(manager() if scaled else None, optimizer, **options)


@Reused
def whole_step():
    network = Regression()
    return nn.TrainOneStepCell(network, OPTIMIZERS["momentum"](network.trainable_params())).set_train()


@eagerly()
def whole_batches(data) -> Run:
    """The reference: MindSpore's own step."""
    step = whole_step()
    losses = [float(step(*map(Tensor, batch)).asnumpy()) for batch in data]
    return Run(np.array(losses), everything(step))


@functools.cache
def reference() -> Run:
    return whole_batches(DATA)


def assert_state(state, expected):
    assert max(relative_error(state[name], value) for name, value in expected.items()) < 1e-5


def good():
    return [Tensor(value) for value in DATA[0]]


def poisoned(sample, value):
    x, y = data(1)[0]
    x[sample, 0] = value
    return [Tensor(x), Tensor(y)]


# -- without overflow the scale changes nothing ------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "mode"), [("cell", "graph"), ("(1,)", "pynative")], indirect=["mode"])
def test_scaled_equals_the_whole_batch(shape, mode):
    step = reused_step() if shape == "cell" else step_of(Tensor([1024.0], ms.float32))
    losses = []
    for batch in DATA:
        loss, overflow, used = step(*map(Tensor, batch))
        assert not overflow.asnumpy()
        assert float(used.asnumpy()) == 1024.0
        losses.append(float(loss.asnumpy()))
    assert relative_error(np.array(losses), reference().losses) < 1e-5
    assert_state(everything(step), reference().state)


MANAGERS = {
    "fixed": FixedLossScaleManager(512.0),
    "fixed, optimizer removes it": FixedLossScaleManager(512.0, drop_overflow_update=False),
    "dynamic": DynamicLossScaleManager(512, 2, 1000),
}


@pytest.mark.core(mode="pynative")
@pytest.mark.parametrize(
    ("way", "kind", "mode"),
    [
        ("Model", "fixed, optimizer removes it", "graph"),
        ("build_train_network", "fixed, optimizer removes it", "pynative"),
        ("Model", "dynamic", "pynative"),
        ("build_train_network", "fixed", "pynative"),
    ],
    indirect=["mode"],
)
def test_loss_scale_managers_equal_the_whole_batch(way, kind, mode):
    loss_scale_manager = MANAGERS[kind]
    network = Regression()
    removes = 512.0 if loss_scale_manager.get_update_cell() is None else 1.0
    optimizer = nn.Momentum(network.trainable_params(), 0.05, 0.9, weight_decay=0.01, loss_scale=removes)
    cell = GradAccumulationCell(network, MICRO_SIZE, max_grad_norm=1e6)
    if way == "Model":
        step = ms.Model(cell, optimizer=optimizer, loss_scale_manager=loss_scale_manager).train_network
    else:
        step = mindspore.amp.build_train_network(cell, optimizer, loss_scale_manager=loss_scale_manager)
    for batch in DATA:
        step(*map(Tensor, batch))
    weights = {parameter.name: as_numpy(parameter) for parameter in network.trainable_params()}
    assert max(relative_error(value, reference().state[name]) for name, value in weights.items()) < 1e-5
    assert 0 < as_numpy(step.grad_norm) < 10


def twice_the_samples(x, y):
    """Any multiple of the samples gives the same mean."""
    return Tensor(2.0 * x.shape[0], ms.float32)


@pytest.mark.parametrize("options", [{}, {"count": twice_the_samples}], ids=["samples", "counted"])
def test_clipping_under_a_scale_that_the_optimizer_removes(options, pynative):
    weights = []
    for scale in (1.0, 512.0):
        network = Regression()
        optimizer = nn.Momentum(network.trainable_params(), 0.05, 0.9, loss_scale=scale)
        cell = GradAccumulationCell(network, MICRO_SIZE, max_grad_norm=0.1, **options)
        fixed = FixedLossScaleManager(scale, drop_overflow_update=False)
        step = mindspore.amp.build_train_network(cell, optimizer, loss_scale_manager=fixed)
        step(*good())
        weights.append(np.append(as_numpy(network.out), as_numpy(step.grad_norm)))
    assert relative_error(*weights) < 1e-5


def layers():
    """Only layers: at O1 MindSpore rewrites the network's source, which then has no access to its module's names."""
    network = nn.SequentialCell(nn.Dense(12, 16), nn.Tanh(), nn.Dense(16, 5))
    for parameter in network.get_parameters():
        parameter.set_data(Tensor(np.random.default_rng(7).normal(size=parameter.shape) * 0.4, ms.float32))
    return network


@pytest.mark.thorough
@pytest.mark.parametrize("level", ["O1", "O2", "auto"])
def test_amp_levels_train_like_the_whole_batch(level):
    """Compared with MindSpore's own step at the same level, within float16's precision. O2 has a dynamic loss scale,
    which MindSpore refuses on CPU, so the reference has none there."""
    finals = []
    for accumulate in (False, True):
        network = layers()
        loss_cell = nn.WithLossCell(network, nn.CrossEntropyLoss())
        optimizer = OPTIMIZERS["sgd"](network.trainable_params())
        if accumulate:
            cell = GradAccumulationCell(loss_cell, MICRO_SIZE)
            step = ms.Model(cell, optimizer=optimizer, amp_level=level).train_network
        else:
            step = mindspore.amp.build_train_network(loss_cell, optimizer, level=level, loss_scale_manager=None)
        skipped = 0
        for batch in batches(SAMPLES, 3):
            outputs = step(*map(Tensor, batch))
            while isinstance(outputs, tuple) and outputs[1].asnumpy():  # 2 ** 24 is too large for float16
                skipped += 1
                outputs = step(*map(Tensor, batch))
        assert (skipped > 0) == (accumulate and level == "O2")
        finals.append(as_numpy(network[0].weight))
    assert relative_error(finals[1], finals[0]) < 5e-3
    assert relative_error(finals[0], as_numpy(layers()[0].weight)) > 1e-2


# -- overflow: drop the window -----------------------------------------------------------------------------------------


@pytest.mark.device(
    "an overflow in any micro-batch drops the window, and halves the loss scale", ran="an H100, 2026-11-27"
)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("position", list(POISONED))
def test_an_overflow_drops_the_window_exactly(position, value):
    """Weights, optimizer state and its step counter bit-identical, accumulators cleared, the scale halved once."""
    step = reused_step()
    step(*good())
    before = everything(step)
    _, overflow, scale = step(*poisoned(POISONED[position], value))
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


def test_an_overflow_seen_in_the_norm_that_clips_drops_the_window(pynative):
    step = reused_step(max_grad_norm=1.0)
    for number, (sample, value) in enumerate(zip(POISONED.values(), (np.nan, np.inf, np.nan), strict=True), 1):
        before = everything(step)
        assert step(*poisoned(sample, value))[1].asnumpy()
        after = everything(step)
        assert after["gaccum_ms.scale_sense"] == 1024 / 2**number
        np.testing.assert_array_equal(after["out"], before["out"])
        assert not any(as_numpy(a).any() for a in step.accu_grads)
    assert not step(*good())[1].asnumpy()
    assert (everything(step)["out"] != after["out"]).any()


def test_the_learning_rate_does_not_advance_on_a_skipped_update(pynative):
    rates, weights = [], []
    for skips in (True, False):
        step = reused_step(optimizer="dynamic_lr")
        for _ in range(2):
            step(*good())
            if skips:
                step(*poisoned(0, float("inf")))
        rates.append(as_numpy(step.optimizer.global_step))
        weights.append(as_numpy(step.weights[0]))
    assert rates[0] == rates[1] == 2
    np.testing.assert_array_equal(*weights)


def test_the_scale_grows_after_a_window_of_good_updates(pynative):
    step = step_of(manager(window=3))
    used = [float(step(*good())[2].asnumpy()) for _ in range(8)]
    assert used[0] == 1024.0
    assert 2048.0 in used
    assert used == sorted(used)


def test_set_sense_scale_reaches_the_compiled_graph():
    step = reused_step()
    for scale in (8.0, 16.0):
        step.set_sense_scale(Tensor(scale, ms.float32))
        assert float(step(*good())[2].asnumpy()) == scale


def test_without_a_scale_nobody_asks(pynative):
    """As in nn.TrainOneStepCell, a NaN reaches the weights."""
    step = reused_step(scaled=False)
    step(*poisoned(7, float("nan")))
    assert np.isnan(as_numpy(step.weights[0])).any()


# -- overflow: drop the micro-batch ------------------------------------------------------------------------------------


WITHOUT = {"first": slice(5, 13), "middle": [0, 1, 2, 3, 4, 10, 11, 12], "last": slice(0, 10)}


def what_is_left(position) -> Run:
    """The reference: a batch without the samples of the poisoned micro-batch."""
    x, y = DATA[0]
    return whole_batches([(x[WITHOUT[position]], y[WITHOUT[position]])])


@pytest.mark.core(mode="pynative")
@pytest.mark.parametrize(
    ("mode", "position", "scaled"),
    [
        *(("graph", position, True) for position in POISONED),
        *(("pynative", position, position != "last") for position in POISONED),
    ],
    indirect=["mode"],
)
def test_a_poisoned_micro_batch_is_left_out(position, scaled, mode):
    """The rest trains like a separate batch."""
    step = reused_step(scaled=scaled, overflow="drop_micro_batch")
    outputs = step(*poisoned(POISONED[position], float("nan")))
    left = what_is_left(position)
    after = everything(step)
    assert_state(after, left.state)
    loss = outputs[0] if scaled else outputs
    assert relative_error(loss.asnumpy(), left.losses) < 1e-5
    assert float(step.dropped_micro_batches.asnumpy()) == 1
    assert float(step.window_count.asnumpy()) == len(np.arange(SAMPLES)[WITHOUT[position]])
    if scaled:
        assert not outputs[1].asnumpy()
        assert after["gaccum_ms.scale_sense"] == 512.0
    step(*good())
    assert float(step.dropped_micro_batches.asnumpy()) == 0


class Root(nn.Cell):
    """Finite at 0, where its gradient is not."""

    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor(1.0, ms.float32), name="weight")

    def construct(self, x):
        return ops.sqrt(self.weight * x).mean()


def test_a_micro_batch_is_left_out_whose_loss_is_finite_and_whose_gradient_is_not(pynative):
    """For x = 1, 0, 4, the gradients are 1/2, 0/0 and 1."""
    network = Root()
    step = make_step(network, micro_size=3, overflow="drop_micro_batch")
    assert float(step(Tensor([1.0, 0.0, 4.0]))) == pytest.approx(1.5)
    assert float(network.weight.asnumpy()) == pytest.approx(1 - 0.1 * 0.75)
    assert float(step.dropped_micro_batches.asnumpy()) == 1


def test_nothing_is_left_when_all_are_poisoned(pynative):
    step = reused_step(scaled=False, overflow="drop_micro_batch")
    before = everything(step)
    x, y = good()
    loss = step(x * float("nan"), y)
    assert float(loss.asnumpy()) == 0
    assert float(step.dropped_micro_batches.asnumpy()) == 3
    after = everything(step)
    for name in before:
        if name not in ("gaccum_ms.batch_count", "gaccum_ms.dropped_micro_batches", "gaccum_ms.window_count"):
            np.testing.assert_array_equal(after[name], before[name], name)


def test_dropping_nothing_equals_the_whole_batch(pynative):
    step = reused_step(scaled=True, overflow="drop_micro_batch")
    losses = [float(step(*map(Tensor, batch))[0].asnumpy()) for batch in DATA]
    assert relative_error(np.array(losses), reference().losses) < 1e-5
    assert_state(everything(step), reference().state)


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale_sense", "error", "message"),
    [
        (1024.0, TypeError, r"must be a Cell or a Tensor, but got 1024.0 of type 'float'. Give mindspore.Tensor\("),
        (ms.amp.DynamicLossScaleManager(), TypeError, r"of type 'DynamicLossScaleManager'.* get_update_cell\(\)"),
        (Tensor([1.0, 2.0], ms.float32), ValueError, r"shape of 'scale_sense' must be \(\) or \(1,\), but got \(2,\)"),
        (Tensor(0.0, ms.float32), ValueError, "'scale_sense' must be positive and finite, but got 0.0"),
        (Tensor(float("inf"), ms.float32), ValueError, "'scale_sense' must be positive and finite, but got inf"),
    ],
)
def test_refuses_bad_scales(scale_sense, error, message):
    with pytest.raises(error, match=message):
        step_of(scale_sense)


def test_set_sense_scale_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"'scale_sense' must be positive and finite, but got 0.0"):
        step_of(Tensor(1.0, ms.float32)).set_sense_scale(Tensor(0.0, ms.float32))
    for step, scale in ((step_of(), Tensor(1.0)), (step_of(manager()), 2.0), (step_of(manager()), Tensor([1.0]))):
        with pytest.raises(TypeError, match="'set_sense_scale' needs that 'scale_sense' was given"):
            step.set_sense_scale(scale)


# -- late overflows ----------------------------------------------------------------------------------------------------


class Slope(nn.Cell):
    """A loss whose gradient is the mean of x, or their sum."""

    def __init__(self, reduction, dtype=ms.float32):
        super().__init__()
        self.weight = ms.Parameter(Tensor(1.0, dtype), name="weight")
        self.reduction = reduction

    def construct(self, x):
        losses = self.weight * x
        return losses.sum() if self.reduction == "sum" else losses.mean()


def five_billion(x):
    return ops.full((), 5e9, dtype=ms.float32)


def assert_no_update(network, scale, x, grad_norm, **options):
    step = make_step(network, lambda weights: nn.SGD(weights, 1.0), scale, micro_size=2, **options)
    _, overflow, _ = step(x)
    assert overflow.asnumpy()
    assert int(step.update_count.asnumpy()) == 0
    assert as_numpy(step.weights[0]) == 1.0
    assert as_numpy(step.grad_norm) == pytest.approx(grad_norm)


def test_a_gradient_that_only_the_weights_float16_cannot_hold_is_an_overflow_where_its_norm_is_finite(pynative):
    """Two micro-batches with gradients of 40,000 sum to 80,000 in the float32 accumulator, and their norm is finite and
    not clipped; but the largest float16 is 65,504."""
    network, x = Slope("sum", ms.float16), Tensor([4e4, 4e4], ms.float16)
    assert_no_update(network, Tensor(1.0, ms.float32), x, 8e4, reduction="sum", max_grad_norm=1e6)


def test_an_infinite_divisor_is_an_overflow_though_the_gradient_that_it_divides_is_finite(pynative):
    """The total count of 1e10 times the scale of 1e30 exceeds float32. The gradient of 1e-6 times both does not;
    divided by infinity it would be zero, and would make an update."""
    x, scale = Tensor([1e-6, 1e-6], ms.float32), Tensor(1e30, ms.float32)
    assert_no_update(Slope("mean"), scale, x, 0.0, count=five_billion, max_grad_norm=1.0)
