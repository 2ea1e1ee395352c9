"""WindowMonitor: hand-worked records, and the same numbers as JSON lines, TensorBoard events and summaries."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops, train
from mindspore.dataset import GeneratorDataset, NumpySlicesDataset
from mindspore.train import RunContext
from mindspore.train.callback import _InternalCallbackParam
from support import paths
from support import window_oracle as oracle
from support.reference import Line, as_numpy, make_network
from support.state import manager

from gaccum_ms import (
    AccumulationScheduler,
    CountMask,
    EvenSplit,
    FlushAccumulation,
    GradAccumulationCell,
    GradNoiseScale,
    TrainOneStepWithGradAccumulationCell,
    WindowMonitor,
)

X = np.array([1, 2, 4], np.float32)
Y = np.array([0, 1, 1], np.float32)


class WeightedLine(Line):
    def construct(self, x, y, mask):
        return (ops.square(self.weight * x - y) * mask).sum() / mask.sum() / 2


def fit(columns=(X, Y), batch=2, epochs=2, line=Line, scale_sense=None, callbacks=(), monitor=None, **options):
    """Train one weight, from 1, at rate 0.1. Returns the records and the step."""
    cell = GradAccumulationCell(line(1.0), **options)
    step = TrainOneStepWithGradAccumulationCell(cell, nn.SGD(cell.trainable_params(), 0.1), scale_sense)
    monitor = monitor or WindowMonitor()
    data = NumpySlicesDataset(tuple(columns), shuffle=False).batch(batch)
    ms.Model(step).train(epochs, data, callbacks=[*callbacks, monitor])
    return monitor.records, step


def assert_record(record, rtol=1e-6, **expected):
    """Compare each field: numbers to float32's rounding; infinities and NaN are equal. `seconds` must be positive."""
    fields = asdict(record)
    expected = {"skipped_updates": 0} | expected  # of SkipSpikes: see transforms/test_transforms.py
    assert 0 < fields.pop("seconds") < 600
    assert fields.keys() == expected.keys()
    for name, value in expected.items():
        if value is None or isinstance(value, (bool, int)):
            assert fields[name] == value, (name, fields[name])
            assert type(fields[name]) is type(value), (name, fields[name])
        else:
            assert fields[name] is not None, name
            got, wanted = (np.where(np.isfinite(one), one, np.nan) for one in (fields[name], value))
            np.testing.assert_allclose(got, wanted, rtol=rtol, err_msg=name)


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

# By hand, in PyNative mode. In graph mode, test_every_field_is_the_oracles has clipping, overflows and rates.


def test_hand_worked_windows(pynative):
    """x = 1, 2 | 4 and y = 0, 1 | 1, at w = 1: losses 0.5, 0.5 | 4.5, gradients x (w x - y) = 1, 2 | 12, mean 5. Then
    w = 0.5: losses 0.125, 0 | 0.5, gradients 0.5, 0 | 4, mean 1.5. Clipped to 2, the first update is 0.2, not 0.5."""
    records, step = fit(accumulation_steps=2, max_grad_norm=100.0)
    common = {"updated": True, "batches": 2, "counts": (2.0, 1.0), "count": 3.0, "dropped_micro_batches": 0}
    common |= {"loss_terms": None, "noise_scale": None, "loss_scale": None, "learning_rate": 0.1}
    assert len(records) == 2
    assert_record(records[0], update=1, epoch=1, losses=(0.5, 4.5), loss=5.5 / 3, grad_norm=5.0, **common)
    assert_record(records[1], update=2, epoch=2, losses=(0.0625, 0.5), loss=0.625 / 3, grad_norm=1.5, **common)
    np.testing.assert_allclose(as_numpy(step.weights[0]), 0.35, rtol=1e-6)


def test_the_norm_is_that_before_clipping(pynative):
    records, step = fit(accumulation_steps=2, max_grad_norm=2.0, epochs=1)
    np.testing.assert_allclose(records[0].grad_norm, 5, rtol=1e-6)
    np.testing.assert_allclose(as_numpy(step.weights[0]), 0.8, rtol=1e-6)


def test_without_accumulation_steps_each_batch_is_a_window(pynative):
    records, _ = fit(micro_size=2, epochs=1)
    common = {"updated": True, "epoch": 1, "batches": 1, "dropped_micro_batches": 0, "grad_norm": None}
    common |= {"loss_terms": None, "noise_scale": None, "loss_scale": None, "learning_rate": 0.1}
    assert_record(records[0], update=1, losses=(0.5,), loss=0.5, counts=(2.0,), count=2.0, **common)
    second = (0.85 * 4 - 1) ** 2 / 2  # at w = 1 - 0.1 * 1.5
    assert_record(records[1], update=2, losses=(second,), loss=second, counts=(1.0,), count=1.0, **common)


@pytest.mark.parametrize("options", [{"accumulation_steps": 2}, {"micro_size": 2}], ids=["spanning", "single"])
def test_counts_are_the_users(options, pynative):
    """Weights 0.5, 0, 2 at w = 1: losses 0.5 | 4.5, of counts 0.5 | 2."""
    mask = np.array([0.5, 0, 2], np.float32)
    records, _ = fit((X, Y, mask), line=WeightedLine, count=CountMask(), epochs=1, **options)
    if "micro_size" in options:
        assert [(record.counts, record.count) for record in records] == [((0.5,), 0.5), ((2.0,), 2.0)]
    else:
        assert [(record.counts, record.count) for record in records] == [((0.5, 2.0), 2.5)]
        np.testing.assert_allclose(records[0].losses, (0.5, 4.5), rtol=1e-6)
        np.testing.assert_allclose(records[0].loss, (0.5 * 0.5 + 2 * 4.5) / 2.5, rtol=1e-6)


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


def test_dropped_micro_batches_are_counted_over_the_window(pynative):
    x = np.array([1, np.nan, np.nan, 2], np.float32)
    options = {"micro_size": 2, "accumulation_steps": 2, "overflow": "drop_micro_batch", "epochs": 1}
    records, _ = fit((x, np.zeros(4, np.float32)), **options)
    assert len(records) == 1
    assert (records[0].dropped_micro_batches, records[0].count, records[0].updated) == (2, 2, True)
    assert records[0].losses == (0.5, 2.0)
    assert records[0].loss == 1.25
    records, _ = fit((x * np.nan, np.zeros(4, np.float32)), **options)
    assert (records[0].dropped_micro_batches, records[0].count, records[0].updated) == (4, 0, False)


def test_the_learning_rate_is_that_of_the_windows_own_update(pynative):
    """Three updates at 0.1, 0.2 and 0.3: read after an update, the rate would be the next update's."""
    cell = GradAccumulationCell(Line(1.0), accumulation_steps=2)
    step = TrainOneStepWithGradAccumulationCell(cell, nn.SGD(cell.trainable_params(), [0.1, 0.2, 0.3, 0.4]))
    monitor = WindowMonitor()
    data = NumpySlicesDataset((X, Y), shuffle=False).batch(2)
    ms.Model(step).train(3, data, callbacks=[monitor])
    np.testing.assert_allclose([record.learning_rate for record in monitor.records], [0.1, 0.2, 0.3], rtol=1e-6)


def test_the_learning_rate_is_that_of_the_update_also_when_a_callback_changes_it_in_mid_window(pynative):
    """MindSpore's LearningRateScheduler sets it after each batch; the weights show the rates of the updates."""
    cell = GradAccumulationCell(Line(1.0), accumulation_steps=2)
    model = ms.Model(cell, optimizer=nn.SGD(cell.trainable_params(), 0.1))
    monitor = WindowMonitor()
    rates = train.LearningRateScheduler(lambda rate, batch: 0.1 / batch)
    model.train(2, NumpySlicesDataset((X, Y), shuffle=False).batch(2), callbacks=[rates, monitor])
    weight = 1.0
    for number, record in enumerate(monitor.records, start=1):
        weight -= record.learning_rate * np.mean(X * (weight * X - Y))
        assert record.learning_rate == pytest.approx(0.1 / (2 * number - 1))
    assert weight == pytest.approx(float(cell.network.weight.asnumpy()), rel=1e-5)


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


class Records(train.Callback):
    def __init__(self):
        super().__init__()
        self.after_steps, self.after_epochs = [], []

    def on_train_step_end(self, run_context):
        self.after_steps.append(run_context.original_args().window_record)

    def on_train_epoch_end(self, run_context):
        self.after_epochs.append(run_context.original_args().window_record)


def test_callbacks_find_the_record_of_a_window_that_has_just_ended(pynative):
    """Also callbacks before the monitor in the list: this package's run first. Three batches, in windows of two."""
    watch = Records()
    records, _ = fit(batch=1, accumulation_steps=2, callbacks=[watch, FlushAccumulation()])
    assert [record.batches for record in records] == [2, 1, 2, 1]
    assert watch.after_steps == [None, records[0], records[1], None, records[2], records[3]]


class StopAt(train.Callback):
    def on_train_step_end(self, run_context):
        if run_context.original_args().cur_step_num == 4:
            run_context.request_stop()


def test_a_window_flushed_by_a_stop_in_mid_epoch_is_recorded(pynative):
    watch = Records()
    records, _ = fit(batch=1, accumulation_steps=2, epochs=5, callbacks=[watch, StopAt(), FlushAccumulation()])
    assert [(record.epoch, record.batches, record.update) for record in records] == [(1, 2, 1), (1, 1, 2), (2, 1, 3)]
    assert watch.after_epochs[-1] == records[-1]


def test_a_window_that_another_training_began_is_recorded_as_a_whole(pynative):
    """Its losses are only those of this training's batches."""
    cell = GradAccumulationCell(Line(1.0), accumulation_steps=2)
    step = TrainOneStepWithGradAccumulationCell(cell, nn.SGD(cell.trainable_params(), 0.1))
    monitor = WindowMonitor()
    model = ms.Model(step)
    with pytest.warns(UserWarning, match="in the middle of a window"):
        model.train(1, NumpySlicesDataset((X[:1], Y[:1])).batch(1), callbacks=[monitor])
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
    assert len({record.noise_scale for record in records}) == 10
    alone, _ = fit(columns, batch=4, epochs=1, micro_size=1, record_noise=True)
    assert np.isnan(alone[0].noise_scale)


# -- every field, against NumPy ----------------------------------------------------------------------------------------

EACH_KIND = {
    "samples": oracle.case(mode="graph", micro_size=3, max_grad_norm=0.2),
    "samples, one micro-batch, scaled": oracle.case(micro_size=1, scale=1024.0, poisoned=[(1, 0)]),
    "samples, a scale that the optimizer removes": oracle.case(
        micro_size=2, scale=1024.0, fixed_scale=True, max_grad_norm=0.2
    ),
    "sum": oracle.case(oracle.Sum, micro_size=2),
    "counts": oracle.case(
        oracle.Masked, "graph", [(1, 3)], micro_size=3, count=CountMask(), scale=1024.0, max_grad_norm=0.2
    ),
    "dropped": oracle.case(
        poisoned=[(0, 0), (1, 0), (1, 2), (1, 4)], micro_size=3, overflow="drop_micro_batch", scale=1024.0
    ),
    "dropped, counts": oracle.case(
        oracle.Masked, "jit", [(2, 1)], micro_size=2, count=CountMask(), overflow="drop_micro_batch", max_grad_norm=0.2
    ),
    "spanning": oracle.case(
        mode="graph", poisoned=[(1, 1)], micro_size=2, accumulation_steps=2, scale=1024.0, flushes=True
    ),
    "spanning sum": oracle.case(oracle.Sum, micro_size=2, accumulation_steps=2, max_grad_norm=0.2),
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
        oracle.MaskedAndMean, "graph", micro_size=3, count=oracle.COUNT_BOTH, loss_weights=(1.0, 0.5), max_grad_norm=0.2
    ),
    "two losses, scaled": oracle.case(
        oracle.MaskedAndMean, poisoned=[(1, 2)], micro_size=2, count=oracle.COUNT_BOTH, scale=1024.0
    ),
    "two losses, samples": oracle.case(oracle.MeanAndMean, micro_size=3, loss_weights=(0.5, 2.0)),
    "loss of the batch": oracle.case(oracle.Spread, micro_size=2, max_grad_norm=0.2, scale=1024.0),
}


@pytest.mark.core(
    "samples",
    "samples, a scale that the optimizer removes",
    "dropped, counts",
    "spanning",
    "spanning counts",
    "two losses",
    "loss of the batch",
)
@pytest.mark.parametrize("kind", EACH_KIND)
def test_every_field_is_the_oracles(kind):
    case = EACH_KIND[kind]
    ms.set_context(mode=ms.GRAPH_MODE if case.mode == "graph" else ms.PYNATIVE_MODE)
    sizes = (5, 6, 4) if case.mode == "pynative" else (5, 5, 5)  # a graph is compiled for each size
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


# -- files -------------------------------------------------------------------------------------------------------------


def strict(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def as_json(record):
    def finite(value):
        if isinstance(value, tuple):
            return [finite(one) for one in value]
        return None if isinstance(value, float) and not np.isfinite(value) else value

    return {name: finite(value) for name, value in asdict(record).items()}


def test_json_lines_are_the_records_and_are_appended(tmp_path, pynative):
    """Values that are not finite, such as the loss of an overflow, are null."""
    path = tmp_path / "made" / "windows.jsonl"
    expected = []
    for kind in (Path, str):
        x = np.array([1, 2, np.nan, 4], np.float32)
        options = {"batch": 1, "epochs": 1, "accumulation_steps": 2, "scale_sense": manager()}
        records, _ = fit((x, np.zeros(4, np.float32)), monitor=WindowMonitor(kind(path)), **options)
        assert len(records) == 2
        expected += [as_json(record) for record in records]
        lines = path.read_text(encoding="utf-8").splitlines()
        assert [strict(line) for line in lines] == expected
    assert expected[1]["loss"] is None
    assert expected[1]["losses"] == [None, pytest.approx((0.75 * 4) ** 2 / 2)]


def test_a_line_that_was_cut_short_costs_no_other(tmp_path, pynative):
    """A killed training may leave half a line, without its end. The next training begins a line of its own."""
    path = tmp_path / "windows.jsonl"
    fit(monitor=WindowMonitor(path), accumulation_steps=2)
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole[:-10], encoding="utf-8")
    records, _ = fit(monitor=WindowMonitor(path), accumulation_steps=2)
    assert path.read_text(encoding="utf-8").startswith(whole[:-10] + "\n")
    lines = path.read_text(encoding="utf-8").splitlines()[-len(records) :]
    assert [strict(line) for line in lines] == [as_json(record) for record in records]


def test_the_file_stays_the_same_when_the_working_folder_changes(tmp_path, pynative, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    move = train.LambdaCallback(on_train_epoch_end=lambda _: os.chdir(tmp_path / "other"))
    records, _ = fit(monitor=WindowMonitor("windows.jsonl"), accumulation_steps=2, callbacks=[move])
    assert len((tmp_path / "windows.jsonl").read_text(encoding="utf-8").splitlines()) == len(records) > 1
    assert not (tmp_path / "other" / "windows.jsonl").exists()


def test_a_file_that_cannot_be_written_is_an_error_before_training(tmp_path, pynative):
    (tmp_path / "file").touch()
    cell = GradAccumulationCell(Line(1.0), accumulation_steps=2)
    step = TrainOneStepWithGradAccumulationCell(cell, nn.SGD(cell.trainable_params(), 0.1))
    data = NumpySlicesDataset((X, Y), shuffle=False).batch(2)
    with pytest.raises(OSError, match="file"):
        ms.Model(step).train(1, data, callbacks=[WindowMonitor(tmp_path / "file" / "windows.jsonl")])
    assert int(step.batch_count.asnumpy()) == 0


FLOATS = ("loss", "count", "grad_norm", "loss_scale", "learning_rate", "seconds")
SCALARS = ("updated", "epoch", "batches", "dropped_micro_batches", "skipped_updates", *FLOATS)


def events(path):
    """The payloads of a file in TensorBoard's format: length, checksum, payload, checksum."""
    content = path.read_bytes()
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        yield content[12 : 12 + length]
        content = content[16 + length :]


def assert_scalars(found, records):
    """`found` : (tag, step, value) of each scalar."""
    expected = {
        (f"window/{name}", record.update): float(getattr(record, name))
        for record in records
        for name in SCALARS
        if getattr(record, name) is not None
    }
    expected |= {
        (f"window/loss_terms/{term}", record.update): loss
        for record in records
        for term, loss in enumerate(record.loss_terms or ())
    }
    assert {(tag, step) for tag, step, _ in found} == expected.keys()
    assert len(found) == len(expected)
    for tag, step, value in found:
        np.testing.assert_allclose(value, expected[tag, step], rtol=1e-6, err_msg=tag)


@pytest.mark.core(several=True)
@pytest.mark.parametrize("several", [False, True], ids=["one loss", "two losses"])
def test_tensorboard_reads_each_number(several, tmp_path, pynative):
    tensorboard = pytest.importorskip("tensorboardX", reason="TensorBoard's writer is the user's to install")
    from tensorboardX.proto.event_pb2 import Event

    writer = tensorboard.SummaryWriter(str(tmp_path))
    monitor = WindowMonitor(summary=writer)
    options = {"accumulation_steps": 2}
    if several:
        options = {"line": oracle.MeanAndMean, "columns": (X, Y, Y), "micro_size": 1, "loss_weights": (1.0, 2.0)}
        options["epochs"] = 1
    records, _ = fit(max_grad_norm=100.0, scale_sense=manager(), monitor=monitor, **options)
    writer.close()
    (path,) = tmp_path.iterdir()
    read = [Event.FromString(payload) for payload in events(path)]
    assert len(records) == 2
    assert_scalars([(v.tag, event.step, v.simple_value) for event in read for v in event.summary.value], records)


# SummaryRecord starts worker processes, which import the script again.
SCRIPT = """
import json, sys
from dataclasses import asdict
import mindspore as ms
import test_monitor

if __name__ == "__main__":
    ms.set_context(mode=ms.PYNATIVE_MODE)
    with ms.SummaryRecord(sys.argv[1]) as summary:
        monitor = test_monitor.WindowMonitor(summary=summary)
        test_monitor.fit(accumulation_steps=2, max_grad_norm=100.0, monitor=monitor)
    print(json.dumps([asdict(record) for record in monitor.records]))
"""


def group_lives(group):
    """Whether a process of the script's session is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.thorough
def test_mindspores_summary_holds_each_number(tmp_path):
    from mindspore.train import summary_pb2

    from gaccum_ms.callbacks.monitor import WindowRecord

    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    folder = tmp_path / "summary"
    environment = os.environ | {"PYTHONPATH": paths.python_path()}
    command = [sys.executable, str(script), str(folder)]
    done = subprocess.Popen(
        command,
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = done.communicate(timeout=600)
        deadline = time.monotonic() + 20
        while group_lives(done.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not group_lives(done.pid)
    finally:
        if group_lives(done.pid):
            os.killpg(done.pid, signal.SIGKILL)
    assert done.returncode == 0, errors
    records = [WindowRecord(**fields) for fields in json.loads(output.splitlines()[-1])]
    assert len(records) == 2
    (path,) = (path for path in folder.iterdir() if path.name.endswith("_MS"))
    read = [summary_pb2.Event.FromString(payload) for payload in events(path)]
    found = [(value.tag, event.step, value.scalar_value) for event in read for value in event.summary.value]
    assert_scalars(found, records)


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"json_lines": 3}, "'json_lines' must be a path, but got 3 of type 'int'"),
        ({"summary": "folder"}, "'summary' must be a mindspore.SummaryRecord or .* but got 'str'"),
    ],
)
def test_refuses_bad_arguments(arguments, message):
    with pytest.raises(TypeError, match=f"For 'WindowMonitor', the argument {message}"):
        WindowMonitor(**arguments)


def test_refuses_another_network(pynative):
    network = nn.WithLossCell(make_network("dense"), nn.CrossEntropyLoss())
    model = ms.Model(network, optimizer=nn.SGD(network.trainable_params(), 0.1))
    data = NumpySlicesDataset((X, Y), shuffle=False).batch(2)
    with pytest.raises(ValueError, match=r"must be a GradAccumulationCell .* but got 'TrainOneStepCell'"):
        model.train(1, data, callbacks=[WindowMonitor()])


def test_refuses_data_sinking():
    """The test calls the callback, because MindSpore never sinks data on CPU."""
    cell = GradAccumulationCell(Line(1.0), accumulation_steps=2)
    parameters = _InternalCallbackParam()
    parameters.train_network = TrainOneStepWithGradAccumulationCell(cell, nn.SGD(cell.trainable_params(), 0.1))
    parameters.dataset_sink_mode = True
    with pytest.raises(ValueError, match="but got 'TrainOneStepWithGradAccumulationCell' and dataset_sink_mode=True"):
        WindowMonitor().on_train_begin(RunContext(parameters))
