"""The records of windows: hand-worked, and against an oracle; and when callbacks get them."""

from __future__ import annotations

import weakref
from dataclasses import asdict

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops, train
from mindspore.dataset import GeneratorDataset, NumpySlicesDataset
from mindspore.train import RunContext
from mindspore.train.callback import _InternalCallbackParam

from gaccum_ms import (
    AccumulationScheduler,
    CountMask,
    EvenSplit,
    FlushAccumulation,
    GradAccumulationCell,
    GradNoiseScale,
    ProgressBar,
    WindowCallback,
    WindowMonitor,
)
from gaccum_ms.record.recorder import WindowRecorder
from tests.support import window_oracle as oracle
from tests.support.reference import Line, as_numpy, make_network, make_step
from tests.support.state import manager

X = np.array([1, 2, 4], np.float32)
Y = np.array([0, 1, 1], np.float32)


def fit(columns=(X, Y), batch=2, epochs=2, line=Line, callbacks=(), monitor=None, **options):
    """Train one weight, from 1, at rate 0.1. Returns the records and the step."""
    step = make_step(line(1.0), **options)
    monitor = monitor or WindowMonitor()
    data = NumpySlicesDataset(tuple(columns), shuffle=False).batch(batch)
    ms.Model(step).train(epochs, data, callbacks=[*callbacks, monitor])
    return monitor.records, step


def assert_record(record, rtol=1e-6, **expected):
    """Compare each field: numbers to float32's rounding; infinities and NaN are equal. `seconds` must be positive."""
    fields = asdict(record)
    del fields["noise"]
    expected = {"skipped_updates": 0} | expected  # of SkipSpikes: see transforms/test_transforms.py
    assert 0 < fields.pop("seconds") < 600
    assert fields.keys() == expected.keys()
    for name, value in expected.items():
        if value is None or isinstance(value, (bool, int, str)):
            assert fields[name] == value, (name, fields[name])
            assert type(fields[name]) is type(value), (name, fields[name])
        else:
            assert fields[name] is not None, name
            actual, wanted = (np.where(np.isfinite(numbers), numbers, np.nan) for numbers in (fields[name], value))
            np.testing.assert_allclose(actual, wanted, rtol=rtol, err_msg=name)


class Sequences(Line):
    """Reads sequences of three numbers, time-major."""

    def construct(self, x):
        return ops.square(self.weight * x[0]).mean()


def test_samples_are_counted_along_their_axis(pynative):
    sequences = GeneratorDataset([(np.ones((3, samples), np.float32),) for samples in (4, 5)], ["x"], shuffle=False)
    cell = GradAccumulationCell(Sequences(1.0), 2, split=EvenSplit(axis=1))
    monitor = WindowMonitor()
    model = ms.Model(cell, optimizer=nn.SGD(cell.trainable_params(), 0.1))
    model.train(1, sequences, callbacks=[monitor], dataset_sink_mode=False)
    assert [record.counts for record in monitor.records] == [(4.0,), (5.0,)]


# -- the records -------------------------------------------------------------------------------------------------------


def test_hand_worked_windows(pynative):
    """x = 1, 2 | 4 and y = 0, 1 | 1, at w = 1: losses 0.5, 0.5 | 4.5, gradients x (w x - y) = 1, 2 | 12, mean 5. Then
    w = 0.5: losses 0.125, 0 | 0.5, gradients 0.5, 0 | 4, mean 1.5."""
    records, step = fit(accumulation_steps=2, max_grad_norm=100.0)
    common = {"updated": True, "batches": 2, "counts": (2.0, 1.0), "count": 3.0, "dropped_micro_batches": 0}
    common |= {"loss_terms": None, "noise_scale": None, "loss_scale": None, "learning_rate": 0.1}
    common |= {"counted": "samples"}
    assert len(records) == 2
    assert_record(records[0], update=1, epoch=1, losses=(0.5, 4.5), loss=5.5 / 3, grad_norm=5.0, **common)
    assert_record(records[1], update=2, epoch=2, losses=(0.0625, 0.5), loss=0.625 / 3, grad_norm=1.5, **common)
    np.testing.assert_allclose(as_numpy(step.weights[0]), 0.35, rtol=1e-6)


def test_an_overflow_is_a_record_that_did_not_update(pynative):
    """Three windows of two batches of one sample. The fourth sample is infinite: the second window overflows."""
    x = np.array([1, 2, 4, np.inf, 1, 2], np.float32)
    y = np.array([0, 1, 1, 0, 0, 1], np.float32)
    records, step = fit((x, y), batch=1, epochs=1, accumulation_steps=2, scale_sense=manager())
    assert [record.updated for record in records] == [True, False, True]
    assert [record.update for record in records] == [1, 1, 2]
    assert [record.loss_scale for record in records] == [1024, 1024, 512]
    assert [np.isfinite(record.loss) for record in records] == [True, False, True]
    assert [np.isfinite(record.losses).tolist() for record in records] == [[True, True], [True, False], [True, True]]
    assert [record.count for record in records] == [2, 2, 2]
    # w = 1: gradients 1, 2, so 0.85; again x = 1, 2 and y = 0, 1: gradients 0.85, 1.4
    np.testing.assert_allclose(records[2].losses, (0.85**2 / 2, 0.7**2 / 2), rtol=1e-5)
    np.testing.assert_allclose(as_numpy(step.weights[0]), 0.85 - 0.1 * 1.125, rtol=1e-5)


class Meddler(train.Callback):
    """Sets the rate wherever a callback may, and stops in mid-epoch."""

    def __init__(self, optimizer):
        super().__init__()
        self.optimizer, self.calls = optimizer, 0

    def set_rate(self, run_context):
        self.calls += 1
        ops.assign(self.optimizer.learning_rate, ms.Tensor(0.1 / (1 + self.calls), ms.float32))

    on_train_step_begin = on_train_epoch_begin = on_train_epoch_end = set_rate

    def on_train_step_end(self, run_context):
        self.set_rate(run_context)
        if run_context.original_args().cur_step_num == 5:
            run_context.request_stop()


def test_the_rate_of_each_update_is_recorded_whoever_changes_it_and_when(pynative):
    """A window of two batches of one sample, a flushed one and, after the schedule's change, two windows of one batch
    until a stop. The weights show the rates of the updates."""
    cell = GradAccumulationCell(Line(1.0), accumulation_steps=2)
    optimizer = nn.SGD(cell.trainable_params(), 0.1)
    monitor = WindowMonitor()
    callbacks = [Meddler(optimizer), AccumulationScheduler({0: 2, 1: 1}, "linear"), FlushAccumulation(), monitor]
    weights = []

    def see(*_):
        weights.append(float(cell.network.weight.asnumpy()))

    after = train.LambdaCallback(on_train_step_begin=see, on_train_end=see)
    ms.Model(cell, optimizer=optimizer).train(
        3, NumpySlicesDataset((X, Y), shuffle=False).batch(1), [*callbacks, after]
    )
    assert [record.batches for record in monitor.records] == [2, 1, 1, 1]
    used = []
    for first, batches in ((0, (0, 1)), (2, (2,)), (3, (0,)), (4, (1,))):
        gradient = np.mean([X[n] * (weights[first] * X[n] - Y[n]) for n in batches])
        used.append((weights[first] - weights[first + len(batches)]) / gradient)
    np.testing.assert_allclose([record.learning_rate for record in monitor.records], used, rtol=1e-4)
    assert len({round(rate, 5) for rate in used}) == 4


class Calls(WindowCallback, train.LossMonitor):
    """A user's callback, which is another callback too: notes the order of its calls, and may act within one."""

    def __init__(self, stop=None, flush=None):
        super().__init__(per_print_times=100)
        self.calls, self.records, self.stop, self.flush = [], [], stop, flush

    def on_train_step_end(self, run_context):
        number = run_context.original_args().cur_step_num
        self.calls.append(f"batch {number}")
        if number == self.stop:
            run_context.request_stop()
        if number == self.flush:
            run_context.original_args().train_network.flush()

    def on_train_epoch_end(self, run_context):
        self.calls.append(f"epoch {run_context.original_args().cur_epoch_num}")

    def on_window_end(self, run_context, record):
        assert run_context.original_args().cur_epoch_num == record.epoch
        self.calls.append(f"window of {record.batches}")
        self.records.append(record)


def test_callbacks_get_the_record_of_each_window_as_soon_as_it_has_ended(pynative):
    """Three batches, in windows of two: also a callback that is listed before FlushAccumulation, which has a flush of
    its own. A flush of nothing ends no window."""
    watch = Calls(flush=5)
    records, _ = fit(batch=1, epochs=3, accumulation_steps=2, callbacks=[watch, FlushAccumulation()])
    assert watch.records == records
    assert watch.calls == [
        *("batch 1", "window of 2", "batch 2", "window of 1", "batch 3", "epoch 1"),
        *("batch 4", "window of 2", "batch 5", "window of 1", "batch 6", "epoch 2"),
        *("batch 7", "window of 2", "batch 8", "window of 1", "batch 9", "epoch 3"),
    ]
    assert [record.update for record in records] == [1, 2, 3, 4, 5, 6]


def test_a_flush_by_the_user_ends_a_window_at_once(pynative):
    watch = Calls(flush=3)
    with pytest.warns(UserWarning, match="in the middle of a window"):
        records, step = fit(batch=1, epochs=2, accumulation_steps=2, callbacks=[watch])
    assert watch.records == records
    calls = ["batch 1", "window of 2", "batch 2", "batch 3", "window of 1", "epoch 1"]
    assert watch.calls == [*calls, "batch 4", "window of 2", "batch 5", "batch 6", "epoch 2"]
    assert step.flush()
    assert len(records) == 3, "the training has ended"


def test_a_window_flushed_by_a_stop_in_mid_epoch_is_recorded(pynative):
    watch = Calls(stop=4)
    records, _ = fit(batch=1, accumulation_steps=2, epochs=5, callbacks=[watch, FlushAccumulation()])
    assert [(record.epoch, record.batches, record.update) for record in records] == [(1, 2, 1), (1, 1, 2), (2, 1, 3)]
    assert watch.calls[-2:] == ["window of 1", "epoch 2"]


def test_a_window_that_another_training_began_is_recorded_as_a_whole(pynative):
    """Its losses are only those of this training's batches."""
    monitor = WindowMonitor()
    model = ms.Model(make_step(Line(1.0), accumulation_steps=2))
    with pytest.warns(UserWarning, match="in the middle of a window") as warned:
        model.train(1, NumpySlicesDataset((X[:1], Y[:1])).batch(1), callbacks=[monitor])
    assert [one.filename for one in warned] == [__file__]
    assert monitor.records == []
    model.train(1, NumpySlicesDataset((X[1:2], Y[1:2])).batch(1), callbacks=[monitor])
    assert [(record.batches, record.count, record.losses) for record in monitor.records] == [(2, 2.0, (0.5,))]
    assert monitor.records[0].updated


def test_the_noise_scale_is_that_of_gradnoisescale(pynative):
    """After each update; NaN if a window has a single micro-batch."""
    random = np.random.default_rng(0)
    columns = random.normal(1, 1, 32).astype(np.float32), random.normal(size=32).astype(np.float32)
    noise = GradNoiseScale()
    records, _ = fit(columns, batch=4, callbacks=[noise], micro_size=2, record_noise=True)
    assert [record.noise_scale for record in records] == [record.noise_scale for record in noise.records]
    assert len({record.noise_scale for record in records}) >= 10
    alone, _ = fit(columns, batch=4, epochs=1, micro_size=1, record_noise=True)
    assert np.isnan(alone[0].noise_scale)


# -- every field, against NumPy ----------------------------------------------------------------------------------------

EACH_KIND = {
    "samples": oracle.case(micro_size=3, max_grad_norm=0.2),
    "samples, a scale that the optimizer removes": oracle.case(
        micro_size=2, scale=1024.0, fixed_scale=True, max_grad_norm=0.2
    ),
    "dropped, counts": oracle.case(
        oracle.Masked, "jit", [(2, 1)], micro_size=2, count=CountMask(), overflow="drop_micro_batch", max_grad_norm=0.2
    ),
    "spanning": oracle.case(poisoned=[(1, 1)], micro_size=2, accumulation_steps=2, scale=1024.0, flushes=True),
    "spanning counts": oracle.case(
        oracle.Masked, micro_size=2, accumulation_steps=2, count=CountMask(), max_grad_norm=0.2, flushes=True
    ),
    "spanning, dropped": oracle.case(
        oracle.Masked,
        poisoned=[(1, 0), (2, 0), (2, 2)],
        micro_size=2,
        accumulation_steps=2,
        count=CountMask(),
        overflow="drop_micro_batch",
        flushes=True,
    ),
    "two losses": oracle.case(
        oracle.MaskedAndMean,
        poisoned=[(1, 2)],
        micro_size=3,
        count=oracle.COUNT_BOTH,
        loss_weights=(1.0, 0.5),
        scale=1024.0,
    ),
    "loss of the batch": oracle.case(oracle.Spread, micro_size=2, max_grad_norm=0.2, scale=1024.0),
}


@pytest.mark.parametrize("kind", EACH_KIND)
def test_every_field_is_the_oracles(kind, pynative):
    case = EACH_KIND[kind]
    sizes = (5, 6, 4) if case.mode == "pynative" else (5, 5, 5)  # one graph
    batches = case.batches(sizes)
    monitor, model = WindowMonitor(), case.make_model()
    data = GeneratorDataset(batches, ["x", "y", "mask"][: len(batches[0])], shuffle=False)
    epochs = min(case.plan.steps, 2)
    model.train(epochs, data, callbacks=[monitor, *([FlushAccumulation()] if case.plan.flushes else [])])
    expected, weight = oracle.expected_records(case.plan, [batches] * epochs)
    assert len(monitor.records) == len(expected)
    for record, fields in zip(monitor.records, expected, strict=True):
        assert_record(record, 1e-5, **fields)
    np.testing.assert_allclose(as_numpy(model.train_network.weights[0]), weight, rtol=1e-5)


def test_a_trained_step_is_freed_without_the_garbage_collector(pynative):
    """When a Cell goes, MindSpore compiles all others anew: that must not happen in the middle of a later training."""
    _, step = fit(epochs=1, micro_size=1)
    freed = weakref.ref(step)
    del step
    assert freed() is None


# -- what is refused, and data sinking ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "callback",
    [Calls(), WindowMonitor(), AccumulationScheduler({0: 2}), GradNoiseScale(), ProgressBar()],
    ids=lambda one: type(one).__name__,
)
def test_another_network_has_no_windows(callback, pynative):
    network = nn.WithLossCell(make_network("dense"), nn.CrossEntropyLoss())
    model = ms.Model(network, optimizer=nn.SGD(network.trainable_params(), 0.1))
    data = NumpySlicesDataset((X, Y), shuffle=False).batch(2)
    with pytest.raises(
        ValueError, match=f"For '{type(callback).__name__}', .* must be a GradAccumulationCell, but got"
    ):
        model.train(1, data, callbacks=[callback])


class Sinks:
    """MindSpore sinks no data on CPU: this makes the calls that it makes elsewhere, with a real step."""

    def __init__(self, *callbacks):
        self.step = make_step(Line(1.0), accumulation_steps=2)
        self.parameters = _InternalCallbackParam(train_network=self.step, list_callback=callbacks, cur_epoch_num=1)
        self.parameters.dataset_sink_mode = True
        self.recorder, self.context = WindowRecorder(self.step), RunContext(self.parameters)
        self.recorder.on_train_begin(self.context)

    def run(self, batches):
        self.recorder.on_train_step_begin(self.context)
        for _ in range(batches):
            self.parameters.net_outputs = self.step(ms.Tensor(X[:2]), ms.Tensor(Y[:2]))
        self.recorder.on_train_step_end(self.context)


def test_with_data_sinking_a_callback_gets_the_last_record_of_each_sink(pynative):
    watch = Calls()
    sinks = Sinks(watch)
    ended = []
    for batches in (5, 2, 1, 2, 1):  # the fourth sink begins and ends between two windows, the fifth ends none
        sinks.run(batches)
        ended.append([(record.update, record.batches) for record in watch.records])
        watch.records.clear()
    assert ended == [[(2, 2)], [(3, 2)], [(4, 2)], [(5, 2)], []]


@pytest.mark.parametrize("callback", [WindowMonitor(), GradNoiseScale()], ids=["monitor", "noise"])
def test_data_sinking_is_refused_where_each_window_counts(callback):
    with pytest.raises(ValueError, match=f"For '{type(callback).__name__}', 'dataset_sink_mode' must be False"):
        Sinks(callback)
