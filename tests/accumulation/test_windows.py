"""Windows of several batches: in the compiled step, and in `ms.Model` and its callbacks.

The oracle is MindSpore's own step on one batch that joins the window's; for one weight it is NumPy. Ranks:
test_window_ranks.py. Records and schedules: test_monitor.py, test_schedule.py.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, train
from mindspore.dataset import NumpySlicesDataset

from gaccum_ms import (
    Accumulators,
    CountMask,
    FlushAccumulation,
    UpdateCheckpoint,
    WindowCallback,
)
from tests.support.modes import eagerly
from tests.support.reference import (
    OPTIMIZERS,
    Clipped,
    Line,
    Regression,
    as_numpy,
    batches,
    make_step,
    relative_error,
)
from tests.support.reuse import Reused
from tests.support.state import assert_identical, everything, manager

EQUAL, RAGGED = (8,) * 6, (7, 4) * 3  # windows of three: 24 samples each; 18, 15
STEPS = 3


def data_of(masked, sizes):
    """Distinct random batches of these sizes, each with another sum of its mask."""
    random = np.random.default_rng(11)
    result = []
    for seed, size in enumerate(sizes):
        x, y = batches(size, 1, seed)[0]
        mask = (np.arange(size) < random.integers(1, size + 1)) * random.uniform(0.2, 2, size)
        result.append((x, y.astype(np.float32), *([mask.astype(np.float32)] if masked else [])))
    return result


def joined(data, windows):
    """The batches of each window joined into one; `windows` : the number of batches of each."""
    ends = np.cumsum(windows)
    return [
        tuple(np.concatenate(column) for column in zip(*data[end - number : end], strict=True))
        for end, number in zip(ends, windows, strict=True)
    ]


class Problem(NamedTuple):
    optimizer: str = "momentum"
    masked: bool = False  # the loss is counted by the mask

    def step(self, scale_sense=None, **options):
        options = {"accumulation_steps": STEPS, "count": COUNT_MASK if self.masked else None, **options}
        return make_step(Regression(), OPTIMIZERS[self.optimizer], scale_sense, **options)


PLAIN, MASKED = Problem(), Problem(masked=True)
COUNT_MASK = CountMask()


@Reused
def reused_step(problem, scaled=False, **options):
    return problem.step(manager() if scaled else None, micro_size=2, **options)


def trained(step):
    """The values that training changes: the network's parameters and the optimizer's, by name."""
    parameters = [*step.network.get_parameters(), *step.optimizer.get_parameters()]
    return {parameter.name: as_numpy(parameter) for parameter in parameters}


@Reused
def whole_step(optimizer, max_norm=None):
    """MindSpore's step."""
    network = Regression()
    step = nn.TrainOneStepCell(network, OPTIMIZERS[optimizer](network.trainable_params())).set_train()
    if max_norm is not None:
        step.grad_reducer = Clipped(max_norm)
    return step


@eagerly()
def train_joined(problem, data, max_norm=None):
    """The reference: losses and changed values of MindSpore's step, in PyNative mode, which compiles nothing."""
    step = whole_step(problem.optimizer, max_norm)
    losses = [float(step(*map(Tensor, batch)).asnumpy()) for batch in data]
    return np.array(losses), trained(step)


@functools.cache
def reference(problem, sizes, windows, max_norm=None):
    return train_joined(problem, joined(data_of(problem.masked, sizes), windows), max_norm)


def run_windows(step, data):
    """Train; returns the losses of the windows that ended, and the changed values."""
    losses = []
    for batch in data:
        step(*map(Tensor, batch))
        if not int(step.window_position.asnumpy()):
            losses.append(float(step.window_loss.asnumpy()))
    if step.flush():
        losses.append(float(step.window_loss.asnumpy()))
    return np.array(losses), trained(step)


def assert_same(run, expected, tolerance=1e-5):
    assert run[0].shape == expected[0].shape
    assert relative_error(run[0], expected[0]) < tolerance, (run[0], expected[0])
    assert run[1].keys() == expected[1].keys()
    errors = {name: relative_error(run[1][name], value) for name, value in expected[1].items()}
    assert max(errors.values()) < tolerance, errors


# -- equivalence -------------------------------------------------------------------------------------------------------


@pytest.mark.core("graph", "ragged", "counted, clipped", "compensated")
@pytest.mark.parametrize(
    ("mode", "problem", "sizes", "options"),
    [
        ("graph", PLAIN, EQUAL, {}),
        ("graph", MASKED, EQUAL, {}),
        ("pynative", PLAIN, RAGGED, {}),
        ("pynative", MASKED, RAGGED, {"max_grad_norm": 0.1}),
        ("pynative", PLAIN, EQUAL, {"jit": True}),
        ("pynative", Problem("adam_weight_decay"), RAGGED, {"accumulators": Accumulators(compensated=True)}),
    ],
    indirect=["mode"],
    ids=["graph", "graph, counted", "ragged", "counted, clipped", "jit", "compensated"],
)
def test_batches_that_share_an_update_equal_the_joined_batch(mode, problem, sizes, options):
    """Window losses, weights and optimizer state, over two updates."""
    step = reused_step(problem) if mode == "graph" else problem.step(micro_size=2, **options)
    run = run_windows(step, data_of(problem.masked, sizes))
    max_norm = options.get("max_grad_norm")
    assert_same(run, reference(problem, sizes, (STEPS,) * 2, max_norm))
    assert int(step.update_count.asnumpy()) == 2
    if max_norm is not None:  # else the test would not exercise clipping
        assert float(step.grad_norm.asnumpy()) > 2 * max_norm


class CountsRuns(Regression):
    def __init__(self):
        super().__init__()
        self.samples = []

    def construct(self, x, y):
        self.samples.append(x.shape[0])
        return super().construct(x, y)


def test_the_window_is_the_product_of_both_numbers(pynative):
    """micro_size=2 and accumulation_steps=3: six micro-batches run for one update."""
    network = CountsRuns()
    step = make_step(network, micro_size=2, accumulation_steps=3)
    for batch in data_of(False, (8, 8, 7)):
        assert int(step.update_count.asnumpy()) == 0
        step(*map(Tensor, batch))
    assert int(step.update_count.asnumpy()) == 1
    assert network.samples == [4, 4, 4, 4, 4, 3]


def check_tail(step, problem=PLAIN, samples=7):
    """Three batches of so many samples, then a tail of two."""
    sizes = (samples,) * 5
    run = run_windows(step, data_of(problem.masked, sizes))
    assert_same(run, reference(problem, sizes, (3, 2)))


def test_a_flushed_tail_equals_its_batches_joined():
    check_tail(reused_step(PLAIN), samples=EQUAL[0])


def test_a_flushed_tail_is_divided_by_its_counts(pynative):
    check_tail(MASKED.step(micro_size=2), MASKED)


# -- a batch that does not end its window ------------------------------------------------------------------------------


CHANGING = ("hidden", "out", "moments")


def check_nothing_trained_between_updates(step):
    for number, batch in enumerate(data_of(False, EQUAL), 1):
        before = trained(step)
        step(*map(Tensor, batch))
        after = trained(step)
        if number % STEPS:
            assert_identical(before, after)
        else:
            changing = [name for name in before if name.startswith(CHANGING)]
            assert len(changing) >= len(step.weights)
            for name in changing:
                assert (before[name] != after[name]).any(), name
    return after


@pytest.mark.parametrize(
    ("problem", "mode"), [(PLAIN, "graph"), (Problem("dynamic_lr"), "pynative")], indirect=["mode"]
)
def test_nothing_that_is_trained_changes_before_the_windows_end(problem, mode):
    """Nothing changes in weights, optimizer state, and its step counter."""
    step = reused_step(problem)
    after = check_nothing_trained_between_updates(step)
    expected = reference(problem, EQUAL, (STEPS,) * 2)
    assert_same((expected[0], after), expected)
    if mode == "graph":
        assert len(step.compile_cache) == 1
    else:
        assert int(step.optimizer.global_step.asnumpy()[0]) == 2


def test_counters_are_right_after_each_call_and_one_graph_serves_all_windows():
    step = reused_line_step()
    batch = Tensor(LINE_X[:4]), Tensor(LINE_Y[:4])
    step.set_accumulation_steps(3)
    seen = []
    for _ in range(7):
        step(*batch)
        seen.append((place(step), int(step.batch_count.asnumpy())))
    assert seen == [((1, 0), 1), ((2, 0), 2), ((0, 1), 3), ((1, 1), 4), ((2, 1), 5), ((0, 2), 6), ((1, 2), 7)]
    assert step.flush() is True
    assert place(step) == (0, 3)
    before = everything(step)
    assert step.flush() is False
    assert_identical(before, everything(step))
    step.set_accumulation_steps(50)
    step(*batch)
    step(*batch)
    assert place(step) == (2, 3)
    assert len(step.compile_cache) == 1


# -- loss scaling ------------------------------------------------------------------------------------------------------

GOOD = data_of(False, EQUAL[:STEPS])


def poisoned(batch, value, sample=0):
    x = batch[0].copy()
    x[sample, 0] = value
    return (x, *batch[1:])


def assert_one_good_window(step):
    losses = np.array([float(step.window_loss.asnumpy())])
    assert_same((losses, trained(step)), reference(PLAIN, EQUAL[:STEPS], (STEPS,)))


@pytest.mark.core(mode="pynative")
def test_an_overflow_in_any_batch_drops_its_whole_window_exactly(mode):
    """The scale is halved once, at the window's end. The good windows train as if the others did not exist."""
    step = reused_step(PLAIN, scaled=True)
    scale = 2.0**10
    dropped = ("scale_sense", "batch_count", "window_loss", "current_iterator_step", "last_overflow_iterator_step")
    for position, value in ((None, 0), (0, np.nan), (1, np.inf), (2, np.nan), (None, 0)):
        before = everything(step)
        overflows, used, left = [], [], []
        for number, batch in enumerate(GOOD):
            outputs = step(*map(Tensor, poisoned(batch, value) if number == position else batch))
            overflows.append(bool(outputs[1].asnumpy()))
            used.append(float(outputs[2].asnumpy()))
            left.append(float(step.scale_sense.asnumpy()))
        bad = position is not None
        assert overflows == [False, False, bad]
        assert used == [scale] * 3
        assert left == [scale, scale, scale / 2 if bad else scale]
        assert place(step)[0] == 0
        if bad:
            assert_identical(everything(step), before, but=[n for n in before if n.split(".")[-1] in dropped])
        scale = left[-1]
    assert int(step.update_count.asnumpy()) == 2
    losses, state = train_joined(PLAIN, joined(GOOD * 2, (STEPS,) * 2))
    assert_same((losses, trained(step)), (losses, state))


def test_a_scale_set_in_mid_window_changes_no_update(pynative):
    step = reused_step(PLAIN, scaled=True)
    for scale, batch in zip((8.0, 2.0**12, 0.25), GOOD, strict=True):
        step.set_sense_scale(Tensor(scale, ms.float32))
        assert float(step(*map(Tensor, batch))[2].asnumpy()) == scale
    assert_one_good_window(step)


# -- batches that fail -------------------------------------------------------------------------------------------------


@pytest.mark.core(mode="pynative")
def test_a_bad_count_leaves_its_batch_out_and_the_window_goes_on(mode):
    """The bad batch is first, in the middle or last in the window: the other two batches make the update."""
    step = reused_step(MASKED)
    good = data_of(True, EQUAL)
    rest = iter(good)
    for position, value in enumerate((-50.0, np.nan, np.inf)):
        for number in range(STEPS):
            if number != position:
                step(*map(Tensor, next(rest)))
                continue
            x, y, mask = good[position]
            before = trained(step)
            with pytest.raises(ValueError, match=r"finite number of items .* left out of its window"):
                step(Tensor(x), Tensor(y), Tensor(np.where(np.arange(8) == 5, value, mask).astype(np.float32)))
            if position != 2:
                assert_identical(before, trained(step))
            assert place(step) == ((number + 1) % 3, position + (position == 2))
        assert place(step) == (0, position + 1)
    losses, state = train_joined(MASKED, joined(good, (2, 2, 2)))
    assert_same((losses, trained(step)), (losses, state))


class Interrupted(Regression):
    """Raises once, at one of its runs, as a user's breakpoint or a bad label would."""

    def __init__(self, at):
        super().__init__()
        self.at = at
        self.calls = 0

    def construct(self, x, y):
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        return super().construct(x, y)


def test_a_batch_that_fails_half_way_drops_its_window_and_the_next_is_right(pynative):
    step = make_step(
        Interrupted(at=4),  # in the second batch
        OPTIMIZERS["momentum"],
        micro_size=2,
        accumulation_steps=3,
        accumulators=Accumulators(compensated=True),
    )
    before = everything(step)
    step(*map(Tensor, GOOD[0]))
    dropped = r"the 1 batch\(es\) before it in its window were dropped"
    with pytest.warns(UserWarning, match=dropped) as caught, pytest.raises(KeyboardInterrupt):
        step(*map(Tensor, GOOD[1]))
    assert len(caught) == 1
    assert_identical(before, everything(step), but=("gaccum_ms.batch_count", "gaccum_ms.batch_items"))
    for batch in GOOD:
        step(*map(Tensor, batch))
    assert_one_good_window(step)


def test_a_refused_batch_leaves_the_window_as_it_was(pynative):
    step = reused_step(PLAIN)
    x, y = map(Tensor, GOOD[0])
    for batch in GOOD:
        before = everything(step)
        with pytest.raises(ValueError, match=r"got shapes \[\(8, 12\), \(7,\)\]"):
            step(x, y[:7])
        assert_identical(before, everything(step))
        step(*map(Tensor, batch))
    assert_one_good_window(step)


# -- ms.Model and its callbacks ----------------------------------------------------------------------------------------

LINE_X = np.random.default_rng(2).normal(size=28).astype(np.float32)
LINE_Y = (2 * LINE_X + np.random.default_rng(3).normal(size=28)).astype(np.float32)
RATE = 0.1


def line_step(steps, line=Line, rate=RATE, **options):
    return make_step(line(1.0), lambda weights: nn.SGD(weights, rate), accumulation_steps=steps, **options)


@Reused
def reused_line_step():
    """Its graph serves all callbacks, and windows of any length."""
    return line_step(4)


def place(step):
    return int(step.window_position.asnumpy()), int(step.update_count.asnumpy())


def line_oracle(windows, batch=4, rate=RATE):
    """The weight after each update, and the batches' losses, by NumPy. The batches of LINE_X repeat, as in epochs;
    `windows` : the number of batches of each update."""
    weight, weights, losses = 1.0, [], []
    starts = range(0, len(LINE_X), batch)
    epochs = [(LINE_X[start : start + batch], LINE_Y[start : start + batch]) for start in starts] * 20
    for update, number in enumerate(windows):
        parts, epochs = epochs[:number], epochs[number:]
        losses += [((weight * x - y) ** 2).mean() / 2 for x, y in parts]
        x, y = (np.concatenate(column).astype(np.float64) for column in zip(*parts, strict=True))
        weight -= (rate(update) if callable(rate) else rate) * (x * (weight * x - y)).mean()
        weights.append(weight)
    return np.array(weights), np.array(losses)


def line_data(batch=4, stop=None):
    return NumpySlicesDataset((LINE_X[:stop], LINE_Y[:stop]), shuffle=False).batch(batch)


class Watch(train.Callback):
    """Records what a callback can read after each batch."""

    def __init__(self):
        super().__init__()
        self.losses, self.weights, self.updates = [], [], []

    def on_train_step_end(self, run_context):
        parameters = run_context.original_args()
        self.losses.append(float(parameters.net_outputs.asnumpy()))
        self.weights.append(as_numpy(parameters.train_network.weights[0]).item())
        self.updates.append(int(parameters.train_network.update_count.asnumpy()))


class StopAt(train.Callback):
    def __init__(self, step=None, epoch=None):
        super().__init__()
        self.step, self.epoch = step, epoch

    def on_train_step_end(self, run_context):
        if run_context.original_args().cur_step_num == self.step:
            run_context.request_stop()

    def on_train_epoch_end(self, run_context):
        if run_context.original_args().cur_epoch_num == self.epoch:
            run_context.request_stop()


def fit(callbacks, steps=4, epochs=2, data=None):
    step = reused_line_step()
    step.set_accumulation_steps(steps)
    ms.Model(step).train(epochs, data or line_data(), callbacks=callbacks)
    return step


def assert_line(step, windows, batch=4):
    expected = line_oracle(windows, batch)[0]
    np.testing.assert_allclose(as_numpy(step.weights[0]), expected[-1], rtol=1e-5)
    assert int(step.update_count.asnumpy()) == len(windows)


LEFT_OVER = r"training ended in the middle of a window: {} batch\(es\) of {} are added up, .* FlushAccumulation"


@pytest.mark.parametrize(("each_epoch", "windows"), [(True, (4, 3, 4, 3)), (False, (4, 4, 4, 2))])
def test_flushes_each_epoch_or_when_training_ends(each_epoch, windows):
    assert_line(fit([FlushAccumulation(each_epoch)]), windows)


def test_without_flush_windows_span_epochs_and_the_user_is_told_what_is_left():
    with pytest.warns(UserWarning, match=LEFT_OVER.format(2, 4)):
        step = fit([])
    assert_line(step, (4, 4, 4))
    assert place(step) == (2, 3)


def test_a_window_larger_than_the_epoch_ends_with_it_or_spans_epochs():
    assert_line(fit([FlushAccumulation()], steps=20), (7, 7))
    with pytest.warns(UserWarning, match=LEFT_OVER.format(1, 20)):
        step = fit([], steps=20, epochs=3)
    assert_line(step, (20,))


def test_an_epoch_that_ends_with_a_closed_window_makes_no_extra_update(pynative):
    """Also not with two callbacks that flush."""
    step = fit([FlushAccumulation(), FlushAccumulation()], data=line_data(7), steps=2)
    assert_line(step, (2, 2, 2, 2), batch=7)


class Evaluation(nn.Cell):
    """The loss, and what a metric needs."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, x, y):
        return self.network(x, y), x, y


def test_evaluation_at_an_epochs_end_sees_the_flushed_weights(pynative):
    step = reused_line_step()
    model = ms.Model(step, eval_network=Evaluation(step.network), eval_indexes=[0, 1, 2], metrics={"mae"})
    seen = []

    class Evaluated(WindowCallback):
        def on_window_end(self, run_context, record):
            seen.append(record.batches)

        def on_eval_begin(self, run_context):
            seen.append(as_numpy(step.weights[0]))

    model.fit(2, line_data(), line_data(), callbacks=[Evaluated(), FlushAccumulation()], dataset_sink_mode=False)
    first, second = line_oracle((4, 3, 4, 3))[0][[1, 3]]
    np.testing.assert_allclose(seen, [4, 3, first, 4, 3, second], rtol=1e-5)


def test_the_order_of_callbacks_does_not_matter(tmp_path):
    """A checkpoint and a watch before FlushAccumulation in the list see its update at the same batch."""
    watch = Watch()
    config = train.CheckpointConfig(save_checkpoint_steps=7, keep_checkpoint_max=9)
    checkpoint = train.ModelCheckpoint("net", str(tmp_path), config)
    step = fit([checkpoint, watch, FlushAccumulation()])
    weights = line_oracle((4, 3, 4, 3))[0]
    np.testing.assert_allclose([watch.weights[6], watch.weights[13]], weights[[1, 3]], rtol=1e-5)
    for epoch, weight in enumerate(weights[[1, 3]], 1):
        saved = ms.load_checkpoint(str(tmp_path / f"net-{epoch}_7.ckpt"))
        assert int(saved["gaccum_ms.window_position"].asnumpy()) == 0
        np.testing.assert_allclose(saved["weight"].asnumpy(), weight, rtol=1e-5)
    assert_line(step, (4, 3, 4, 3))


@pytest.mark.parametrize(
    ("each_epoch", "stop", "windows"),
    [(True, StopAt(step=9), (4, 3, 2)), (False, StopAt(step=9), (4, 4, 1)), (False, StopAt(epoch=2), (4, 4, 4, 2))],
)
def test_a_stop_flushes_what_is_left(each_epoch, stop, windows):
    """The stop comes from a callback after FlushAccumulation, as with EarlyStopping."""
    assert_line(fit([FlushAccumulation(each_epoch), stop], epochs=5), windows)


def test_callbacks_see_each_batchs_own_loss(capsys):
    """LossMonitor and History count batches, and get batch means with the weights of the batch's window."""
    watch, history = Watch(), train.History()
    fit([watch, history, train.LossMonitor(1), FlushAccumulation()])
    losses = line_oracle((4, 3, 4, 3))[1]
    printed = re.findall(r"epoch: (\d) step: (\d), loss is ([\d.]+)", capsys.readouterr().out)
    assert [line[:2] for line in printed] == [(str(e), str(s)) for e in (1, 2) for s in range(1, 8)]
    np.testing.assert_allclose([float(line[2]) for line in printed], losses, rtol=1e-5)
    np.testing.assert_allclose(watch.losses, losses, rtol=1e-5)
    np.testing.assert_allclose(np.ravel(history.history["net_output"]), losses[[6, 13]], rtol=1e-5)
    assert watch.updates == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4]


def test_checkpoints_by_update_and_by_batch(tmp_path, pynative):
    """Windows of three in eight batches: updates after batches 3 and 6 of the first epoch, 1, 4 and 7 of the second.
    Both save once more when training ends."""
    updates = UpdateCheckpoint(2, prefix="update", directory=str(tmp_path))
    config = train.CheckpointConfig(save_checkpoint_steps=3, keep_checkpoint_max=20)
    by_batch = train.ModelCheckpoint("batch", str(tmp_path), config)
    with pytest.warns(UserWarning, match=LEFT_OVER.format(1, 3)):
        fit([updates, by_batch], steps=3, data=line_data(3, 24))
    names = sorted(path.stem for path in tmp_path.glob("*.ckpt"))
    assert names == [f"batch-{at}" for at in ("1_3", "1_6", "2_1", "2_4", "2_7", "2_8")] + [
        f"update-{at}" for at in ("1_6", "2_4", "2_8")
    ]
    for name in ("update-1_6", "update-2_4"):
        saved = ms.load_checkpoint(str(tmp_path / f"{name}.ckpt"))
        assert int(saved["gaccum_ms.window_position"].asnumpy()) == 0
    assert int(saved["gaccum_ms.update_count"].asnumpy()) == 4


def test_callbacks_refuse_bad_arguments():
    with pytest.raises(TypeError, match="'each_epoch' must be a bool, but got 1"):
        FlushAccumulation(each_epoch=1)
    for updates, error in ((0, ValueError), (True, TypeError), (1.5, TypeError)):
        with pytest.raises(error, match="For 'UpdateCheckpoint', the argument 'updates' must be"):
            UpdateCheckpoint(updates)
    with pytest.raises(ValueError, match=r"'save_checkpoint_steps' of 'config' must be 1, .* but got 5"):
        UpdateCheckpoint(2, config=train.CheckpointConfig(save_checkpoint_steps=5))
