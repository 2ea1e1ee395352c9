"""Transforms of a finished gradient: each link, and chains, compared with NumPy on whole batches."""

from __future__ import annotations

import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import (
    AdaptiveGradientClip,
    ClipByGlobalNorm,
    ClipByValue,
    GradAccumulationCell,
    GradAccumulator,
    SkipSpikes,
    TrainOneStepWithGradAccumulationCell,
    Transform,
    WeightAverage,
    WindowMonitor,
    audit,
    find_micro_batch_size,
)
from gaccum_ms.backend.parameters import own
from gaccum_ms.transforms.chain import others
from tests.support import by_hand, reference
from tests.support.adopted import joined
from tests.support.by_hand import ByHand, train_whole
from tests.support.reference import FEATURES, Regression, as_numpy, batches, relative_error, vector
from tests.support.state import assert_identical, everything

RATE, SAMPLES = 0.05, 11
TOLERANCE = 1e-5


def data(number=9, spikes=(3, 7)):
    """Regression batches; the targets of spikes are far off."""
    plain = enumerate(batches(SAMPLES, number))
    return [(x, (y * (50 if index in spikes else 1)).astype(np.float32)) for index, (x, y) in plain]


def momentum(network):
    return nn.Momentum(network.trainable_params(), RATE, 0.9)


def make_step(*transforms, network=None, **options):
    options = {"micro_size": 3, "optimizer": lambda weights: nn.Momentum(weights, RATE, 0.9)} | options
    return reference.make_step(network or Regression(), transforms=transforms, **options)


def weights_of(step):
    return vector(step.weights)


def run(step, batches_of_run):
    """The weights after each batch."""
    rows = []
    for batch in batches_of_run:
        step(*map(Tensor, batch))
        rows.append(weights_of(step))
    return rows


def whole(rules, batches_of_run, after=()):
    network = Regression()
    return train_whole(network, ByHand(momentum(network), rules, after), batches_of_run)


def assert_same(rows, reference, tolerance=TOLERANCE):
    assert len(rows) == len(reference)
    assert max(map(relative_error, rows, reference)) < tolerance


# -- links against the whole batch -------------------------------------------------------------------------------------


def shifted(gradients):
    return gradients[0] + 0.125, gradients[1]


def links_of(name, network):
    if name == "adaptive":
        return [AdaptiveGradientClip(0.05, exclude=[network.out])], [by_hand.adaptive(0.05, exclude=[1])]
    clips = AdaptiveGradientClip(0.1), ClipByGlobalNorm(0.2), ClipByValue(0.1, -0.05)
    rules = by_hand.spikes(3.0, history=4, warmup=2), lambda gradients, _: [gradients[0] + 0.125, gradients[1]]
    clipped = by_hand.adaptive(0.1), by_hand.global_norm(0.2), by_hand.value(-0.05, 0.1)
    return [SkipSpikes(3.0, history=4, warmup_updates=2), shifted, *clips, WeightAverage(0.5)], [*rules, *clipped]


# In graph mode, one chain has all links.
@pytest.mark.parametrize(("name", "mode"), [("adaptive", "pynative"), ("all", "graph")], indirect=["mode"])
def test_equals_the_rule_on_whole_batches(name, mode):
    network = Regression()
    links, rules = links_of(name, network)
    step = make_step(*links, network=network)
    rows = run(step, data())
    assert_same(rows, whole(rules, data()))
    assert int(step.update_count.asnumpy()) == (7 if name == "all" else 9)  # two spikes


class Halving(Transform):
    def __init__(self):
        super().__init__()
        self.factor = 2.0

    def change(self, gradients):
        self.factor = self.factor / 2
        return tuple(gradient * self.factor for gradient in gradients)


def test_state_that_a_compiled_update_would_not_write_is_refused_where_it_is_compiled(pynative):
    why = r"must keep in Parameters .* writes .*self\.factor of 'Halving'.* by self\.state\(.* with jit=False"
    with pytest.raises(ValueError, match=why):
        make_step(Halving(), jit=True)
    step = make_step(Halving())
    ms.set_context(mode=ms.GRAPH_MODE)
    before = everything(step)
    for call in (lambda: make_step(Halving()), lambda: step(*map(Tensor, data()[0]))):
        with pytest.raises(ValueError, match=why):
            call()
    assert_identical(everything(step), before)


def test_max_grad_norm_comes_first_and_is_the_clip_at_the_front(pynative):
    short = make_step(ClipByValue(0.05), max_grad_norm=0.1)
    front = make_step(ClipByGlobalNorm(0.1), ClipByValue(0.05))
    assert_same(run(short, data(3)), run(front, data(3)), 1e-12)
    np.testing.assert_array_equal(short.grad_norm.asnumpy(), front.grad_norm.asnumpy())
    assert front.update.max_grad_norm == 0.1


# -- averages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("warmup", "mode"), [(True, "pynative"), (3.0, "graph")], indirect=["mode"])
def test_averages_are_those_of_whole_batches(warmup, mode):
    network = Regression()
    optimizer = ByHand(momentum(network), [])
    optimizer.after.append(average := by_hand.Average(optimizer.weights(), 0.5, warmup))
    transform = WeightAverage(0.5, warmup=warmup)
    assert_same(run(make_step(transform), data(5)), train_whole(network, optimizer, data(5)))
    for mine, expected in zip(transform.averages, average.values, strict=True):
        assert mine.dtype == ms.float32
        assert relative_error(as_numpy(mine), expected) < TOLERANCE
        assert mine.name.startswith(own("average."))


def test_averages_begin_with_the_weights_before_the_first_update(pynative):
    """The weights may have been loaded after the step was built."""
    transform = WeightAverage(0.75)
    step = make_step(transform, micro_size=1)
    for weight in step.weights:
        weight.set_data(Tensor(as_numpy(weight) * 3 + 1))
    before = weights_of(step)
    step(*map(Tensor, data(1)[0]))
    averages = vector(transform.averages)
    assert relative_error(averages, 0.75 * before + 0.25 * weights_of(step)) < 1e-6


@pytest.mark.filterwarnings("ignore:For 'GradAccumulationCell', the network has")
def test_buffers_are_averaged_on_request(pynative):
    norm = nn.BatchNorm1d(FEATURES)
    transform = WeightAverage(0.5, buffers=True)
    network = nn.WithLossCell(nn.SequentialCell(norm, nn.Dense(FEATURES, 1)), nn.MSELoss())
    step = make_step(transform, network=network, micro_size=2)
    names = [one.name for one in transform.averages]
    assert own("average.0.moving_mean") in names and own("average.0.moving_variance") in names
    assert len(names) == len(step.weights) + 2
    expected = None  # the average begins with the value at the first update
    for x, y in data(3):
        step(Tensor(x), Tensor(y[:, None]))
        now = as_numpy(norm.moving_mean)
        expected = now if expected is None else (expected + now) / 2
    with step.averaged_weights():
        assert relative_error(as_numpy(norm.moving_mean), expected) < TOLERANCE
    np.testing.assert_array_equal(as_numpy(norm.moving_mean), now)


# -- what is left out, and NaN -----------------------------------------------------------------------------------------


def test_a_window_that_is_left_out_changes_neither_weights_nor_optimizer(pynative):
    step = make_step(SkipSpikes(norm=3.0), WeightAverage(0.5))
    run(step, data(3, ()))
    before = everything(step)
    run(step, data(4, (3,))[3:])
    after = everything(step)
    judged = {own(name) for name in ("judged_norms", "judged_updates", "judged_norm", "skipped_updates")}
    assert_identical(before, after, but={own("batch_count"), *judged})
    assert all(not np.array_equal(before[name], after[name]) for name in judged)


def test_nan_stays_nan(pynative):
    gradients = (Tensor([np.nan, np.inf, 0.25, -np.inf], ms.float32),)
    np.testing.assert_array_equal(ClipByValue(0.5, -0.25)(gradients)[0].asnumpy(), [np.nan, 0.5, 0.25, -0.25])
    assert np.isnan(ClipByGlobalNorm(1.0)(gradients)[0].asnumpy()).all()
    step = make_step(AdaptiveGradientClip(0.01))
    x, y = data(1)[0]
    step(Tensor(x * np.nan), Tensor(y))
    assert np.isnan(as_numpy(step.weights[0])).any()


def test_a_spike_of_nan_is_seen_behind_a_clip_by_value(pynative):
    step = make_step(ClipByValue(0.5), SkipSpikes(norm=1e6))
    before = weights_of(step)
    x, y = data(1)[0]
    step(Tensor(x * np.nan), Tensor(y))
    np.testing.assert_array_equal(weights_of(step), before)
    assert (int(step.skipped_updates.asnumpy()), int(step.update_count.asnumpy())) == (1, 0)


def test_a_gradient_that_stays_large_is_accepted_in_the_end(pynative):
    step = make_step(SkipSpikes(2.0, history=4, warmup_updates=2))
    x, y = data(1, ())[0]
    updates = []
    for size in (1, 1, 1, 1, 40, 40, 40, 40):
        step(Tensor(x), Tensor(y * size))
        updates.append(int(step.update_count.asnumpy()))
    assert updates[:6] == [1, 2, 3, 4, 4, 4] and updates[-1] > 4


def test_links_see_the_gradient_without_the_scale_that_is_left_to_the_optimizer(pynative):
    """With drop_overflow_update=False, the optimizer's own `loss_scale` divides the scale out."""
    network = Regression()
    cell = GradAccumulationCell(network, 2, transforms=(SkipSpikes(norm=3.0), ClipByValue(0.05)))
    optimizer = nn.Momentum(network.trainable_params(), RATE, 0.9, loss_scale=1024.0)
    fixed = ms.amp.FixedLossScaleManager(1024.0, drop_overflow_update=False)
    step = ms.amp.build_train_network(cell, optimizer, loss_scale_manager=fixed)
    assert_same(run(step, data(5)), whole([by_hand.spikes(norm=3.0), by_hand.value(-0.05, 0.05)], data(5)))
    assert int(step.skipped_updates.asnumpy()) == 1


# -- GradAccumulator, audit, the monitor -------------------------------------------------------------------------------


def test_in_a_loop_of_ones_own(pynative):
    """The accumulator is compiled."""
    six = data(6, spikes=(2, 3))
    network = Regression()
    optimizer = momentum(network)
    links = SkipSpikes(norm=3.0), ClipByGlobalNorm(0.2), WeightAverage(0.5)
    accumulator = GradAccumulator(optimizer, 2, transforms=links, jit=True)
    grad_fn = ms.value_and_grad(network, None, optimizer.parameters)
    updated = [accumulator(grad_fn(*map(Tensor, batch))[1]) for batch in six]
    assert updated == [False, True, False, False, False, True]
    assert int(accumulator.skipped_updates.asnumpy()) == 1
    other = Regression()
    by_rules = ByHand(momentum(other), [by_hand.spikes(norm=3.0), by_hand.global_norm(0.2)])
    by_rules.after.append(average := by_hand.Average(by_rules.weights(), 0.5))
    assert relative_error(weights_of(accumulator), train_whole(other, by_rules, joined(six, 2))[-1]) < TOLERANCE
    with accumulator.averaged_weights():
        expected = np.concatenate([one.ravel() for one in average.values])
        assert relative_error(vector(network.trainable_params()), expected) < TOLERANCE
        with pytest.raises(RuntimeError, match="no training within 'averaged_weights"):
            accumulator.flush()


def test_audit_looks_at_the_gradient_before_them(pynative):
    network = Regression()
    spikes = SkipSpikes(norm=1e-6)
    cell = GradAccumulationCell(network, 3, transforms=(spikes, WeightAverage(0.5)))
    assert audit(cell, momentum(network), *map(Tensor, data(1)[0])).ok
    assert not spikes.in_step


def test_the_monitor_records_what_was_left_out(pynative):
    network = Regression()
    cell = GradAccumulationCell(network, 3, transforms=(SkipSpikes(norm=3.0),))
    monitor = WindowMonitor()
    columns = tuple(map(np.concatenate, zip(*data(5, (2,)), strict=True)))
    data_set = ms.dataset.NumpySlicesDataset(columns, shuffle=False).batch(SAMPLES)
    ms.Model(cell, optimizer=momentum(network)).train(1, data_set, callbacks=[monitor])
    assert [record.updated for record in monitor.records] == [True, True, False, True, True]
    assert [record.skipped_updates for record in monitor.records] == [0, 0, 1, 1, 1]
    assert monitor.records[2].grad_norm > 3.0 > monitor.records[1].grad_norm


# -- bad arguments -----------------------------------------------------------------------------------------------------

BAD = {
    "a class": (lambda: make_step(ClipByValue), TypeError, "'transforms' must be a tuple of Transforms"),
    "a text": (lambda: ClipByGlobalNorm("1"), TypeError, "'max_norm' must be a float, but got '1'"),
    "empty interval": (lambda: ClipByValue(-1.0), ValueError, "got min_value=1.0 and max_value=-1.0"),
    "not trained": (
        lambda: make_step(AdaptiveGradientClip(exclude=[ms.Parameter(Tensor(1.0), name="other")])),
        *(ValueError, "got other, which it does not update"),
    ),
    "no limit": (SkipSpikes, ValueError, "at least one of 'factor' .* must be given"),
    "spikes behind a clip": (
        lambda: make_step(ClipByValue(1.0), ClipByGlobalNorm(1.0), SkipSpikes(2.0)),
        *(ValueError, "'SkipSpikes' must come before the gradient is clipped"),
    ),
    "two averages": (
        lambda: make_step(WeightAverage(0.9), WeightAverage(0.99)),
        *(ValueError, f"got two Parameters named '{re.escape(own('average.hidden'))}'"),
    ),
    "twice the same": (lambda: make_step(*[ClipByValue(1.0)] * 2), ValueError, "or that stands there twice"),
    "buffers of an accumulator": (
        lambda: GradAccumulator(momentum(Regression()), 2, transforms=(WeightAverage(buffers=True),)),
        *(ValueError, "'buffers' must be False in a GradAccumulator"),
    ),
    "no averages": (
        lambda: make_step(ClipByValue(1.0)).averaged_weights().__enter__(),
        *(ValueError, "needs averages, but got none"),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    make, error, words = BAD[name]
    with pytest.raises(error, match=f"For '.*{words}"):
        make()


def test_a_link_belongs_to_one_step():
    clip = ClipByValue(1.0)
    make_step(clip)
    with pytest.raises(ValueError, match=r"must belong to one training step, .* got a 'ClipByValue' that another"):
        make_step(clip)


def test_a_function_that_returns_something_else_is_refused_before_anything_changes(pynative):
    def only_one(gradients):
        return gradients[:1]

    step = make_step(only_one)
    before = everything(step)
    with pytest.raises(ValueError, match=r"must return a tuple .* but got 1 of shapes .*from 'only_one'"):
        step(*map(Tensor, data(1)[0]))
    assert_identical(before, everything(step), but={own("random_state")})


# -- one's own ---------------------------------------------------------------------------------------------------------


class EverySecond(Transform):
    """A user's own transform, with state, a veto and a change."""

    def prepare(self, network):
        self.seen = self.state("seen", np.zeros((), np.int32))
        self.made = self.state("made", np.zeros((), np.int32))

    def allows(self, gradients):
        seen = ops.assign_add(self.seen, Tensor(1, ms.int32))
        return seen % 2 == 1

    def change(self, gradients):
        return ops.HyperMap()(ops.neg, gradients)

    def after_update(self, after):
        return ops.depend(after, ops.assign_add(self.made, Tensor(1, ms.int32)))


def test_a_transform_of_ones_own():
    mine = EverySecond()
    step = make_step(mine)
    rows = run(step, data(5, ()))
    seen = iter(range(5))
    rule = [lambda g, _: [-one for one in g] if next(seen) % 2 == 0 else None]
    assert_same(rows, whole(rule, data(5, ())))
    assert (int(mine.seen.asnumpy()), int(mine.made.asnumpy())) == (5, 3)
    assert own("made") in {one.name for one in step.get_parameters()}


class Scaled(nn.Cell):
    """A Cell that is no Transform."""

    def __init__(self):
        super().__init__()
        self.scale = ms.Parameter(Tensor(0.5), name="scale", requires_grad=False)

    def construct(self, gradients):
        return tuple(gradient * self.scale for gradient in gradients)


def test_a_cell_may_be_a_link_and_its_parameters_are_the_steps(pynative):
    step = make_step(Scaled(), jit=True)
    assert any(parameter.name.endswith("scale") for parameter in step.get_parameters())
    run(step, data(1))


def test_a_search_for_a_size_tries_them_without_using_them(pynative):
    """Before and after the step is built: trials have their own links."""
    network = Regression()
    average = WeightAverage(0.5)
    clip = AdaptiveGradientClip(0.1, exclude=[network.out])
    cell = GradAccumulationCell(network, micro_batch_size=2, transforms=(clip, average))
    optimizer = momentum(network)
    batch = [Tensor(one[:2]) for one in data(1)[0]]  # few samples: few sizes are tried
    assert find_micro_batch_size(cell, optimizer, batch) == 2
    assert not average.in_step
    step = TrainOneStepWithGradAccumulationCell(cell, optimizer).set_train()
    run(step, data(2))
    before = everything(step)
    assert find_micro_batch_size(cell, optimizer, batch) == 2
    run(make_step(*others(cell.transforms), network=network), data(1))  # as on an accelerator, in this process
    run(step, data(3)[2:])
    assert int(average.averaged_updates.asnumpy()) == 3
    assert before.keys() == everything(step).keys()
