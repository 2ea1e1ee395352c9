"""Windows of several batches: in the compiled step, and in `ms.Model` and its callbacks. The oracle is NumPy.

Their updates: options/test_setups.py. Ranks: test_window_ranks.py. Records and schedules: test_monitor.py,
test_schedule.py.
"""

from __future__ import annotations

import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, train
from mindspore.dataset import NumpySlicesDataset

from gaccum_ms import Accumulators, FlushAccumulation, UpdateCheckpoint
from tests.support.reference import Line, as_numpy, make_step
from tests.support.reuse import Reused
from tests.support.state import assert_identical, everything

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


def fit(callbacks, steps=4, data=None):
    """Two epochs."""
    step = reused_line_step()
    step.set_accumulation_steps(steps)
    ms.Model(step).train(2, data or line_data(), callbacks=callbacks)
    return step


def assert_line(step, windows):
    np.testing.assert_allclose(as_numpy(step.weights[0]), line_oracle(windows)[0][-1], rtol=1e-5)
    assert int(step.update_count.asnumpy()) == len(windows)


# -- the step ---------------------------------------------------------------------------------------------------------


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


class Interrupted(Line):
    """Raises once, at its fourth run, as a user's breakpoint or a bad label would."""

    calls = 0

    def construct(self, x, y):
        self.calls += 1
        if self.calls == 4:
            raise KeyboardInterrupt
        return super().construct(x, y)


def test_a_batch_that_fails_half_way_drops_its_window_and_the_next_is_right(pynative):
    step = line_step(3, Interrupted, micro_size=2, accumulators=Accumulators(compensated=True))
    before = everything(step)
    batches = [(Tensor(LINE_X[at : at + 4]), Tensor(LINE_Y[at : at + 4])) for at in (0, 4, 8)]
    step(*batches[2])
    dropped = r"the 1 batch\(es\) before it in its window were dropped"
    with pytest.warns(UserWarning, match=dropped) as caught, pytest.raises(KeyboardInterrupt):
        step(*batches[1])
    assert len(caught) == 1
    assert_identical(before, everything(step), but=("gaccum_ms.batch_count", "gaccum_ms.batch_items"))
    for batch in batches:
        with pytest.raises(ValueError, match=r"got shapes \[\(4,\), \(3,\)\]"):  # the window stays as it was
            step(batch[0], batch[1][:3])
        step(*batch)
    assert_line(step, [3])


# -- ms.Model and its callbacks ----------------------------------------------------------------------------------------


LEFT_OVER = r"training ended in the middle of a window: {} batch\(es\) of {} are added up, .* FlushAccumulation"


@pytest.mark.parametrize(
    ("each_epoch", "stop", "windows"),
    [(False, StopAt(), (4, 4, 4, 2)), (True, StopAt(step=9), (4, 3, 2)), (False, StopAt(epoch=1), (4, 3))],
)
def test_what_is_left_is_flushed_when_training_ends_or_is_stopped(each_epoch, stop, windows):
    """The stop comes from a callback after FlushAccumulation, as with EarlyStopping."""
    assert_line(fit([FlushAccumulation(each_epoch), stop]), windows)


def test_without_flush_windows_span_epochs_and_the_user_is_told_what_is_left():
    with pytest.warns(UserWarning, match=LEFT_OVER.format(2, 4)):
        step = fit([])
    assert_line(step, (4, 4, 4))
    assert place(step) == (2, 3)


class Evaluation(nn.Cell):
    """The loss, and what a metric needs."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, x, y):
        return self.network(x, y), x, y


def test_callbacks_see_each_batchs_own_loss_and_their_order_does_not_matter(tmp_path, capsys):
    """A checkpoint and a watch before FlushAccumulation in the list see its update at the same batch. LossMonitor and
    History count batches, and get batch means with the weights of the batch's window."""
    watch, history = Watch(), train.History()
    config = train.CheckpointConfig(save_checkpoint_steps=7, keep_checkpoint_max=9)
    checkpoint = train.ModelCheckpoint("net", str(tmp_path), config)
    step = fit([checkpoint, watch, history, train.LossMonitor(1), FlushAccumulation()])
    weights, losses = line_oracle((4, 3, 4, 3))
    np.testing.assert_allclose([watch.weights[6], watch.weights[13]], weights[[1, 3]], rtol=1e-5)
    for epoch, weight in enumerate(weights[[1, 3]], 1):
        saved = ms.load_checkpoint(str(tmp_path / f"net-{epoch}_7.ckpt"))
        assert int(saved["gaccum_ms.window_position"].asnumpy()) == 0
        np.testing.assert_allclose(saved["weight"].asnumpy(), weight, rtol=1e-5)
    assert_line(step, (4, 3, 4, 3))
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
    with pytest.raises(ValueError, match="For 'UpdateCheckpoint', the argument 'updates' must be"):
        UpdateCheckpoint(0)
    with pytest.raises(ValueError, match=r"'save_checkpoint_steps' of 'config' must be 1, .* but got 5"):
        UpdateCheckpoint(2, config=train.CheckpointConfig(save_checkpoint_steps=5))
