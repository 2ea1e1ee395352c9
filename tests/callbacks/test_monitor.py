"""WindowMonitor: the records as JSON lines and TensorBoard events."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import asdict
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, train

from gaccum_ms import CountMask, GradAccumulator, WindowMonitor
from gaccum_ms.report import records as report
from tests.record.test_recorder import X, Y, fit
from tests.support import window_oracle as oracle
from tests.support.state import manager


def rows(path):
    """The records in a file, which must be JSON without NaN and Infinity."""
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text(encoding="utf-8").splitlines()]


def as_json(record):
    def finite(value):
        if isinstance(value, tuple):
            return [finite(one) for one in value]
        return None if isinstance(value, float) and not np.isfinite(value) else value

    return {name: finite(value) for name, value in asdict(record).items() if name != "noise"}


def test_a_loops_records_are_written_and_read_for_a_report(tmp_path, pynative):
    path, weight = tmp_path / "loop.jsonl", ms.Parameter(ms.Tensor([1.0]), name="weight")
    accumulator, monitor = GradAccumulator(nn.SGD([weight], 0.1), 2, jit=False), WindowMonitor(path)
    for loss in (3.0, 5.0, 2.0, 1.0):
        if accumulator((ms.Tensor([1.0]),), loss=loss):
            monitor.add(accumulator.record())
    assert rows(path) == list(map(as_json, monitor.records))
    windows = report.read(path).windows
    assert [(window.update, window.number("loss")) for window in windows] == [(1, 4.0), (2, 1.5)]
    scalars = monitor.records[1].scalars()
    assert (scalars["loss"], scalars["updated"], scalars["count"]) == (1.5, 1.0, 2.0)
    assert monitor.records[1].counted == "batches", "no sample is known"
    assert not scalars.keys() & {"update", "counted", "losses", "counts", "epoch", "grad_norm", "noise"}


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
        assert rows(path) == expected
    assert expected[1]["loss"] is None
    assert expected[1]["losses"] == [None, pytest.approx((0.75 * 4) ** 2 / 2)]


def test_a_line_that_was_cut_short_costs_no_other(tmp_path, pynative):
    """A killed training may leave half a line, without its end. The next training begins a line of its own."""
    path = tmp_path / "windows.jsonl"
    fit(monitor=WindowMonitor(path), accumulation_steps=2)
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole[:-10], encoding="utf-8")
    records, _ = fit(monitor=WindowMonitor(path), accumulation_steps=2)
    cut, _, later = path.read_text(encoding="utf-8").partition(whole[:-10] + "\n")
    assert not cut
    path.write_text(later, encoding="utf-8")
    assert rows(path) == list(map(as_json, records))


def test_the_file_stays_the_same_when_the_working_folder_changes(tmp_path, pynative, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    move = train.LambdaCallback(on_train_epoch_end=lambda _: os.chdir(tmp_path / "other"))
    records, _ = fit(monitor=WindowMonitor("windows.jsonl"), accumulation_steps=2, callbacks=[move])
    assert len((tmp_path / "windows.jsonl").read_text(encoding="utf-8").splitlines()) == len(records) > 1
    assert not (tmp_path / "other" / "windows.jsonl").exists()


def test_a_file_that_cannot_be_written_is_an_error_before_training(tmp_path, pynative):
    (tmp_path / "file").touch()
    batches = []
    note = train.LambdaCallback(on_train_step_begin=lambda _: batches.append(1))
    with pytest.raises(OSError, match="file"):
        fit(monitor=WindowMonitor(tmp_path / "file" / "windows.jsonl"), accumulation_steps=2, callbacks=[note])
    assert not batches


SCALARS = (
    *("loss", "count", "grad_norm", "loss_scale", "learning_rate", "seconds"),
    *("updated", "epoch", "batches", "dropped_micro_batches", "skipped_updates"),
)


def events(path):
    """The payloads of a file in TensorBoard's format: length, checksum, payload, checksum."""
    content = path.read_bytes()
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        yield content[12 : 12 + length]
        content = content[16 + length :]


def test_tensorboard_reads_each_number(tmp_path, pynative):
    tensorboard = pytest.importorskip("tensorboardX", reason="TensorBoard's writer is the user's to install")
    from tensorboardX.proto.event_pb2 import Event

    writer = tensorboard.SummaryWriter(str(tmp_path))
    monitor = WindowMonitor(summary=writer)
    two_losses = {"line": oracle.MaskedAndMean, "columns": (X, Y, Y), "loss_weights": (1.0, 2.0)}
    options = {"count": (CountMask(), None), "micro_size": 1, "max_grad_norm": 100.0, "scale_sense": manager()}
    records, _ = fit(epochs=1, monitor=monitor, **two_losses, **options)
    writer.close()
    (path,) = tmp_path.iterdir()
    read = [Event.FromString(payload) for payload in events(path)]
    assert len(records) == 2
    expected = {
        (f"window/{name}", record.update): float(getattr(record, name))
        for record in records
        for name in SCALARS
        if getattr(record, name) is not None
    }
    expected |= {
        (f"window/loss_terms/{term}", record.update): loss
        for record in records
        for term, loss in enumerate(record.loss_terms)
    }
    scalars = {(v.tag, event.step): v.simple_value for event in read for v in event.summary.value}
    assert scalars == {name: pytest.approx(value, rel=1e-6) for name, value in expected.items()}


def test_refuses_bad_arguments():
    with pytest.raises(TypeError, match="For 'WindowMonitor', the argument 'json_lines' must be a path, but got 3"):
        WindowMonitor(3)
    with pytest.raises(TypeError, match="'summary' must be TensorBoard's SummaryWriter, but got 'str'"):
        WindowMonitor(summary="folder")
