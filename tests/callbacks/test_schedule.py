"""AccumulationScheduler: its windows, compilation only once, and the change of the learning rate."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn
from mindspore.experimental import optim

from gaccum_ms import AccumulationScheduler, FlushAccumulation, WindowMonitor, resume, scale_learning_rate
from tests.accumulation.test_windows import LINE_X, LINE_Y, RATE, line_data, line_oracle, line_step, place
from tests.support.reference import Line, as_numpy, make_step
from tests.support.reuse import Reused
from tests.support.versions import before


@Reused
def reused_step(own):
    """One step for all tests with the same number of batches, so that none compiles anew."""
    if own > 1:
        return line_step(own)
    step = line_step(own, micro_size=2)
    step.let_windows_span_batches()  # as the callback does before it trains
    return step


def fit(scheduler, own=1, epochs=4, each_epoch=True, rate=RATE, step=None):
    """Train on seven batches per epoch, with a cell of `own` accumulation_steps. Returns the step and the records."""
    step = step or (reused_step(own) if rate is RATE else line_step(own, rate=rate))
    monitor = WindowMonitor()
    ms.Model(step).train(epochs, line_data(), callbacks=[monitor, scheduler, FlushAccumulation(each_epoch)])
    return step, monitor.records


def assert_windows(step, records, windows, rate=RATE):
    """The records have these windows, and so had the compiled step: the weight equals training on joined batches."""
    assert [record.batches for record in records] == windows
    assert place(step) == (0, len(windows))
    np.testing.assert_allclose(as_numpy(step.weights[0]), line_oracle(windows, rate=rate)[0][-1], rtol=1e-5)


def test_the_rate_of_an_optimizer_without_global_step_follows(pynative):
    step = make_step(Line(1.0), lambda weights: optim.SGD([{"params": weights, "lr": RATE}], 0.5), micro_size=2)
    step, records = fit(AccumulationScheduler({1: 2}, learning_rate="linear"), epochs=2, step=step)
    rates = [RATE] * 7 + [2 * RATE] * 4
    np.testing.assert_allclose([record.learning_rate for record in records], rates, rtol=1e-6)
    assert_windows(step, records, [1] * 7 + [2, 2, 2, 1], rate=lambda update: rates[update])


def test_by_epoch(pynative):
    """Also from a cell with accumulation_steps=1 alone, as in ``max(round(64 / batch), 1)`` . Epochs end with a short
    window, because they are flushed."""
    step, records = fit(AccumulationScheduler({3: 20, 0: 1, 1: 2}), step=line_step(1))
    assert_windows(step, records, [1] * 7 + [2, 2, 2, 1] * 2 + [7])
    assert [record.epoch for record in records] == [1] * 7 + [2] * 4 + [3] * 4 + [4]


def test_a_second_training_begins_with_the_cells_own_number_again(pynative):
    """It does not begin with the number with which the first training ended."""
    step, monitor = reused_step(3), WindowMonitor()
    for _ in range(2):
        callbacks = [monitor, AccumulationScheduler({1: 4}, "linear"), FlushAccumulation()]
        ms.Model(step).train(2, line_data(), callbacks=callbacks)
    assert [record.batches for record in monitor.records] == [3, 3, 1, 4, 3] * 2
    rates = np.array([1, 1, 1, 4 / 3, 4 / 3] * 2) * RATE
    np.testing.assert_allclose([record.learning_rate for record in monitor.records], rates, rtol=1e-5)


def test_by_a_function_of_the_number_of_updates(pynative):
    asked = []

    def schedule(update):
        asked.append(update)
        return 1 + update % 3

    step, records = fit(AccumulationScheduler(schedule), epochs=2, each_epoch=False)
    assert_windows(step, records, [1, 2, 3, 1, 2, 3, 1, 1])  # the last is flushed: no batches are left
    assert sorted(set(asked)) == list(range(len(records) + 1))  # after the last window too


def test_a_change_that_comes_due_in_mid_window_waits_for_its_end(pynative):
    """The second epoch begins within a window of three, which updates at the rate for three."""
    scheduler = AccumulationScheduler({0: 3, 1: 2}, learning_rate="linear")
    step, records = fit(scheduler, own=3, epochs=2, each_epoch=False)
    assert_windows(step, records, [3, 3, 3, 2, 2, 1], rate=lambda update: RATE if update < 3 else RATE * 2 / 3)


def test_an_open_window_keeps_the_number_that_it_began_with(pynative):
    """The number is set to 1 in the middle of the first window."""
    step, windows, before = reused_step(3), [], 0
    for number in range(1, 6):
        step(Tensor(LINE_X[:4]), Tensor(LINE_Y[:4]))
        if number == 1:
            step.set_accumulation_steps(1)
        if not place(step)[0]:
            windows.append(number - before)
            before = number
    assert windows == [3, 1, 1]


# With the schedule {1: 4, 2: 1} and a cell with 2, which is the number before the first entry.
WINDOWS = [2, 2, 2, 1, 4, 3] + [1] * 7
RATIOS = [1] * 4 + [2] * 2 + [0.5] * 7


@pytest.mark.parametrize(("rule", "exponent"), [("linear", 1.0), ("sqrt", 0.5), (None, 0.0)])
def test_the_learning_rate_follows(rule, exponent):
    """The optimizer's rate is for the cell's own number; a compiled step sees each new rate."""
    step, records = fit(AccumulationScheduler({1: 4, 2: 1}, learning_rate=rule), own=2, epochs=3)
    rates = [RATE * ratio**exponent for ratio in RATIOS]
    np.testing.assert_allclose([record.learning_rate for record in records], rates, rtol=1e-6)
    assert_windows(step, records, WINDOWS, rate=lambda update: rates[update])
    assert len(step.compile_cache) == 1


def test_the_learning_rate_follows_what_it_was_for_not_the_cells_own_number(tmp_path, pynative):
    """Saved at a rate for four batches, and resumed by a cell with two: the rate is already for four."""
    schedule, monitor, file = AccumulationScheduler({0: 1, 1: 4}, "linear"), WindowMonitor(), tmp_path / "four.ckpt"
    step, _ = fit(schedule, epochs=2)
    ms.save_checkpoint(step, str(file))
    other = reused_step(2)
    resume(other, file)
    ms.Model(other).train(3, line_data(), callbacks=[monitor, schedule, FlushAccumulation()], initial_epoch=2)
    assert {round(record.learning_rate / RATE, 5) for record in monitor.records} == {4.0}
    assert [record.batches for record in monitor.records] == [4, 3]


def test_a_schedule_of_rates_follows_by_the_update(pynative):
    """The schedule still counts updates; its rates are multiplied."""
    rate = scale_learning_rate(nn.PolynomialDecayLR(0.1, 0.01, 13, 1.0), 1)
    step, records = fit(AccumulationScheduler({1: 4, 2: 1}, learning_rate="linear"), own=2, epochs=3, rate=rate)
    rates = [(0.1 - 0.09 * update / 13) * ratio for update, ratio in enumerate(RATIOS)]
    np.testing.assert_allclose([record.learning_rate for record in records], rates, rtol=1e-5)
    assert_windows(step, records, WINDOWS, rate=lambda update: rates[update])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"schedule": {}}, ValueError, "'schedule' must not be empty"),
        ({"schedule": {0: 0}}, ValueError, r"'schedule\[0\]' must be at least 1, but got 0"),
        ({"schedule": {0: 1, 5: True}}, TypeError, r"'schedule\[5\]' must be an int, but got True"),
        ({"schedule": {-1: 2}}, ValueError, "'epoch of schedule' must be at least 0, but got -1"),
        ({"schedule": {True: 2}}, TypeError, "'epoch of schedule' must be an int, but got True"),
        ({"schedule": 4}, TypeError, "must be a dict from epochs .* or a function .* but got 4"),
        ({"schedule": {0: 2}, "learning_rate": "cubic"}, ValueError, r"one of \['linear', 'sqrt'\], but got 'cubic'"),
    ],
)
def test_refuses_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=f"For 'AccumulationScheduler', .*{message}"):
        AccumulationScheduler(**arguments)


class TwoLosses(Line):
    def construct(self, x, y):
        return (self.weight * x).mean(), (self.weight * y).mean()


def test_refuses_before_it_trains(pynative):
    scheduled = line_step(2, rate=nn.CosineDecayLR(0.01, 0.1, 8))
    two_losses = make_step(TwoLosses(1.0), micro_size=2, loss_weights=(1.0, 2.0))
    for step, arguments, message in (
        (reused_step(3), [lambda update: 0], "For 'AccumulationScheduler', the argument 'schedule' must be"),
        (scheduled, [{5: 4}, "linear"], r"the schedule 'CosineDecayLR'.* scale_learning_rate\(schedule, 1\)"),
        (two_losses, [{0: 2}], "need a network of one loss, .* but got one of several losses"),
    ):
        with pytest.raises(ValueError, match=message):
            ms.Model(step).train(1, line_data(), callbacks=[AccumulationScheduler(*arguments)])
        assert int(step.batch_count.asnumpy()) == 0


@pytest.mark.xfail(before(2, 8), reason="on MindSpore 2.7 mint's SGD is refused")
def test_refuses_a_rate_that_is_compiled_in():
    step = make_step(Line(1.0), lambda weights: mint.optim.SGD(weights, RATE), micro_size=2)
    with pytest.raises(ValueError, match=r"must read its learning rate at each update, .* mindspore.mint.optim.SGD"):
        fit(AccumulationScheduler({0: 1, 1: 2}, learning_rate="linear"), step=step)


def test_refuses_a_step_that_has_run_with_windows_of_one_batch(pynative):
    step = line_step(1, micro_size=2)
    ms.Model(step).train(1, line_data())
    with pytest.raises(RuntimeError, match=r"before the first step, but got a step that has run.*accumulation_steps"):
        ms.Model(step).train(1, line_data(), callbacks=[AccumulationScheduler({0: 2})])
    with pytest.raises(RuntimeError, match="a step that has run"):
        step.set_accumulation_steps(2)
    step.set_accumulation_steps(1)
    with pytest.raises(ValueError, match="the argument 'accumulation_steps' must be"):
        step.set_accumulation_steps(0)
