"""The records of windows, against an oracle, and when callbacks get them."""

from __future__ import annotations

import weakref
from dataclasses import asdict

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, train
from mindspore.dataset import GeneratorDataset, NumpySlicesDataset
from mindspore.train import RunContext
from mindspore.train.callback import _InternalCallbackParam

from gaccum_ms import AccumulationScheduler, CountMask, FlushAccumulation, ProgressBar, WindowCallback, WindowMonitor
from gaccum_ms.record.recorder import WindowRecorder
from tests.support import window_oracle as oracle
from tests.support.reference import Line, as_numpy, make_step

X = np.array([1, 2, 4], np.float32)
Y = np.array([0, 1, 1], np.float32)


def fit(columns=(X, Y), batch=2, epochs=2, line=Line, callbacks=(), monitor=None, **options):
    """Train one weight, from 1, at rate 0.1. Returns the records and the step."""
    step, monitor = make_step(line(1.0), **options), monitor or WindowMonitor()
    data = NumpySlicesDataset(tuple(columns), shuffle=False).batch(batch)
    ms.Model(step).train(epochs, data, callbacks=[*callbacks, monitor])
    return monitor.records, step


def assert_record(record, expected):
    """Compare each field: numbers to float32's rounding; infinities and NaN are equal. `seconds` must be positive."""
    fields = asdict(record)
    del fields["noise"]
    expected = {"skipped_updates": 0} | expected  # of SkipSpikes: see transforms/test_transforms.py
    assert 0 < fields.pop("seconds") < 600
    assert fields.keys() == expected.keys()
    for name, value in expected.items():
        if value is None or isinstance(value, (bool, int, str)):
            assert (fields[name], type(fields[name])) == (value, type(value)), name
        else:
            assert fields[name] is not None, name
            actual, wanted = (np.where(np.isfinite(numbers), numbers, np.nan) for numbers in (fields[name], value))
            np.testing.assert_allclose(actual, wanted, rtol=1e-5, err_msg=name)


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
    """Three batches, in windows of two, up to a stop in mid-epoch: also a callback that is listed before
    FlushAccumulation, which has a flush of its own. A flush of nothing ends no window."""
    watch = Calls(flush=5, stop=7)
    records, _ = fit(batch=1, epochs=5, accumulation_steps=2, callbacks=[watch, FlushAccumulation()])
    assert watch.records == records
    assert watch.calls == [
        *("batch 1", "window of 2", "batch 2", "window of 1", "batch 3", "epoch 1"),
        *("batch 4", "window of 2", "batch 5", "window of 1", "batch 6", "epoch 2"),
        *("batch 7", "window of 1", "epoch 3"),
    ]
    assert [record.update for record in records] == [1, 2, 3, 4, 5]


def test_a_flush_by_the_user_ends_a_window_at_once(pynative):
    watch = Calls(flush=3)
    with pytest.warns(UserWarning, match="in the middle of a window"):
        records, step = fit(batch=1, epochs=2, accumulation_steps=2, callbacks=[watch])
    assert watch.records == records
    calls = ["batch 1", "window of 2", "batch 2", "batch 3", "window of 1", "epoch 1"]
    assert watch.calls == [*calls, "batch 4", "window of 2", "batch 5", "batch 6", "epoch 2"]
    assert step.flush()
    assert len(records) == 3, "the training has ended"


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


DROPS = {"count": CountMask(), "overflow": "drop_micro_batch"}
TWO_LOSSES = {"count": (CountMask(), None), "loss_weights": (1.0, 0.5)}
POISONED = [(1, 0), (2, 0), (2, 2)]
EACH_KIND = {
    "dropped, counts": oracle.Case(oracle.Masked, "jit", [(2, 1)], micro_size=2, max_grad_norm=0.2, **DROPS),
    "spanning, dropped": oracle.Case(
        oracle.Masked, poisoned=POISONED, micro_size=2, accumulation_steps=2, flushes=True, **DROPS
    ),
    "two losses, an overflow": oracle.Case(
        oracle.MaskedAndMean, poisoned=[(1, 2)], micro_size=3, scale=1024.0, **TWO_LOSSES
    ),
    "loss of the batch, a scale that the optimizer removes": oracle.Case(
        oracle.Spread, micro_size=2, scale=1024.0, fixed_scale=True, max_grad_norm=0.2
    ),
}


@pytest.mark.parametrize("kind", EACH_KIND)
def test_every_field_is_the_oracles(kind, pynative):
    case = EACH_KIND[kind]
    sizes = (5, 6, 4) if case.mode == "pynative" else (5, 5, 5)  # one graph
    batches = case.batches(sizes)
    monitor, model = WindowMonitor(), case.make_model()
    data = GeneratorDataset(batches, ["x", "y", "mask"][: len(batches[0])], shuffle=False)
    epochs = min(case.steps, 2)
    model.train(epochs, data, callbacks=[monitor, *([FlushAccumulation()] if case.flushes else [])])
    expected, weight = case.expected_records([batches] * epochs)
    assert len(monitor.records) == len(expected)
    for record, fields in zip(monitor.records, expected, strict=True):
        assert_record(record, fields)
    np.testing.assert_allclose(as_numpy(model.train_network.weights[0]), weight, rtol=1e-5)


def test_a_trained_step_is_freed_without_the_garbage_collector(pynative):
    """When a Cell goes, MindSpore compiles all others anew: that must not happen in the middle of a later training."""
    _, step = fit(epochs=1, micro_size=1)
    freed = weakref.ref(step)
    del step
    assert freed() is None


def test_another_network_has_no_windows(pynative):
    network = Line(1.0)
    model = ms.Model(network, optimizer=nn.SGD(network.trainable_params(), 0.1))
    for callback in (Calls(), AccumulationScheduler({0: 2}), ProgressBar()):
        name = type(callback).__name__
        with pytest.raises(ValueError, match=f"For '{name}', .* must be a GradAccumulationCell, but got"):
            model.train(1, NumpySlicesDataset((X, Y), shuffle=False).batch(2), callbacks=[callback])


def test_data_sinking_is_refused_where_each_window_counts():
    """MindSpore sinks no data on CPU: this makes the call that it makes elsewhere."""
    step = make_step(Line(1.0), accumulation_steps=2)
    parameters = _InternalCallbackParam(train_network=step, list_callback=[WindowMonitor()], dataset_sink_mode=True)
    with pytest.raises(ValueError, match="For 'WindowMonitor', 'dataset_sink_mode' must be False"):
        WindowRecorder(step).on_train_begin(RunContext(parameters))
