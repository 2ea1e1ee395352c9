"""ProgressBar: what a real training draws, on a pseudo-terminal and into a file, and when it draws nothing."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import struct
import termios

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import Callback, RunContext
from mindspore.train.callback import _InternalCallbackParam
from support.reference import Line
from support.reuse import Reused
from tqdm import tqdm

from gaccum_ms import FlushAccumulation, GradAccumulationCell, ProgressBar, TrainOneStepWithGradAccumulationCell
from gaccum_ms.callbacks.progress import _fitting

X = np.array([1, 2, 4, 1, 2, 4, 3], np.float32)
Y = np.array([0, 1, 1, 0, 1, 1, 2], np.float32)


def make_step(rate=0.01, scale_sense=None, **options):
    cell = GradAccumulationCell(Line(1.0), **options)
    return TrainOneStepWithGradAccumulationCell(cell, nn.SGD(cell.trainable_params(), rate), scale_sense)


reused_step = Reused(make_step)


def fit(bar, step=None, epochs=2, callbacks=(), batch=2, **options):
    """Seven samples, in four batches."""
    step = step or reused_step(**options)
    data = NumpySlicesDataset((X, Y), shuffle=False).batch(batch)
    ms.Model(step).train(epochs, data, callbacks=[bar, *callbacks])
    return step


def drawn(file):
    """The texts that were drawn."""
    return [text for text in re.split(r"[\r\n]+", file.getvalue()) if text.strip()]


def every_batch(**options):
    file = io.StringIO()
    return ProgressBar(file, show=True, refresh_seconds=0, **options), file


@pytest.mark.core(mode="graph")
def test_each_batch_is_drawn_with_its_numbers(mode):
    """Windows of two batches, by hand at w = 1: the first two batches have the losses 0.5 and 2.5."""
    bar, file = every_batch()
    step = fit(bar, make_step(accumulation_steps=2, max_grad_norm=100.0))
    texts = drawn(file)
    assert len(texts) >= 1 + 8
    batches = [text for text in texts if "samples/s" in text or "1/8 batches" in text]
    assert "1/8 batches" in batches[0]
    assert batches[0].startswith("Epoch 1/2:")
    assert "update 0, loss 0.5, lr 0.01]" in batches[0]  # x = 1, 2 and y = 0, 1
    assert "samples/s" not in batches[0]  # that batch waited for the compiler
    second = next(text for text in batches if "2/8 batches" in text)
    # x = 1, 2, 4, 1: losses 0.5, 0.5, 4.5, 0.5 and gradients 1, 2, 12, 1
    assert "update 1, loss 1.5, lr 0.01, norm 4," in second
    assert re.search(r"norm 4, \d+ samples/s\]", second)
    assert next(text for text in batches if "5/8 batches" in text).startswith("Epoch 2/2:  62%|")
    assert "8/8 batches" in texts[-1]
    assert "100%" in texts[-1]
    assert "samples/s" in texts[-1]
    assert f"update {int(step.update_count.asnumpy())}," in texts[-1]
    assert file.getvalue().endswith("\n")


def test_without_windows_and_clipping_the_batchs_loss_and_no_norm(pynative):
    bar, file = every_batch()
    fit(bar, make_step(micro_size=2, rate=[0.1, 0.2, 0.3, 0.4, 0.5]), epochs=1)
    texts = drawn(file)
    assert any("1/4 batches" in text and "update 1, loss 0.5, lr 0.2]" in text for text in texts)
    assert all("norm" not in text for text in texts)


def test_with_loss_scaling(pynative):
    """The step returns a tuple."""
    bar, file = every_batch()
    manager = nn.FixedLossScaleUpdateCell(1024)
    fit(bar, make_step(scale_sense=manager, micro_size=2), epochs=1)
    assert any("1/4 batches" in text and "update 1, loss 0.5," in text for text in drawn(file))


def test_the_end_shows_a_flush(pynative):
    bar, file = every_batch()
    fit(bar, epochs=1, callbacks=[FlushAccumulation()], accumulation_steps=3)
    assert "4/4 batches" in drawn(file)[-1]
    assert "update 2," in drawn(file)[-1]


def on_a_terminal(columns, **options):
    """What is drawn on a terminal of this width."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with open(slave, "w", encoding="utf-8") as terminal:
        fit(ProgressBar(terminal), **options)
    read = b""
    with contextlib.suppress(OSError):  # raised when the other end is closed
        while data := os.read(master, 1 << 16):
            read += data
    os.close(master)
    return [part for part in re.split(r"[\r\n]+", read.decode()) if part.strip()]


def test_a_pseudo_terminal_gets_a_bar_of_its_width():
    texts = on_a_terminal(100, micro_size=2)
    assert "8/8 batches" in texts[-1]
    assert "█" in texts[-1]
    assert 90 <= max(map(len, texts)) <= 100


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (70, ["Epoch 2/2", "8/8", "<", "loss", "lr 0.01", "norm", "/s"]),
        (50, ["8/8", "<", "loss", "lr 0.01", "norm"]),
        (40, ["8/8", "<", "loss", "lr 0.01"]),
        (20, ["8/8", "loss"]),
        (5, ["8/8"]),
    ],
)
def test_a_narrow_terminal_does_without_the_least_important(columns, shown):
    texts = on_a_terminal(columns, micro_size=2, max_grad_norm=100.0)
    assert max(map(len, texts)) <= columns
    parts = ["Epoch 2/2", "8/8", "<", "update", "loss", "lr 0.01", "norm", "/s"]
    assert [part for part in parts if part in texts[-1]] == shown, texts[-1]


SHOWN = {"bar": "|", "percentage": "%", "elapsed": "3:25:45", "words": " batches", "update": "update"}
SHOWN |= {"epoch": "Epoch", "speed": "12345", "norm": "norm", "rate": "lr", "left": "<", "loss": "loss"}


def test_numbers_of_a_long_training_fit_too():
    """Only the least important parts are missing, in the documented order."""
    numbers = {"update": "update 12345", "loss": "loss 0.1234", "rate": "lr 0.0001234", "norm": "norm 1.234"}
    numbers["speed"] = "12345 samples/s"
    bar = tqdm(total=20000, file=io.StringIO(), desc="Epoch 10/100")
    bar.start_t, bar.n = bar.start_t - 12345.0, 6789
    seen = []
    for columns in range(200, 10, -1):
        bar.ncols = columns
        bar.bar_format = _fitting(bar, numbers)
        text = str(bar)
        assert len(text) <= columns
        missing = [name for name, part in SHOWN.items() if part not in text]
        if missing not in seen:
            seen.append(missing)
    assert seen == [list(SHOWN)[:count] for count in range(len(SHOWN) + 1)]
    bar.ncols = 70
    bar.bar_format = _fitting(bar, numbers)
    assert all(part in str(bar) for part in ("lr 0.0001234", "norm 1.234", "12345/s")), str(bar)


def never(*_):
    raise AssertionError("a bar that is not drawn must not read anything")


def test_nothing_is_written_or_read_where_there_is_no_terminal(capfd, monkeypatch, tmp_path):
    monkeypatch.setattr("gaccum_ms.callbacks.progress._numbers", never)
    fit(ProgressBar(), micro_size=2)  # pytest's standard error is a file
    with (tmp_path / "log").open("w") as log:
        fit(ProgressBar(log), micro_size=2)
    fit(ProgressBar(io.StringIO(), show=False), micro_size=2)
    captured = capfd.readouterr()
    assert "batches" not in captured.out + captured.err
    assert (tmp_path / "log").read_text() == ""


def test_the_device_is_read_only_when_the_bar_is_drawn(monkeypatch):
    reads = []
    original = ProgressBar.on_train_step_end.__globals__["_numbers"]
    monkeypatch.setattr("gaccum_ms.callbacks.progress._numbers", lambda *given: reads.append(1) or original(*given))
    file = io.StringIO()
    fit(ProgressBar(file, show=True, refresh_seconds=1000), micro_size=2, epochs=3)
    assert len(reads) == 2  # the first batch, and the end
    assert "12/12 batches" in drawn(file)[-1]
    bar, file = every_batch()
    fit(bar, micro_size=2, epochs=3)
    assert len(reads) == 2 + 12 + 1


class Stop(Callback):
    def __init__(self, error=None):
        super().__init__()
        self.error = error

    def on_train_step_end(self, run_context):
        if run_context.original_args().cur_step_num == 3:
            if self.error:
                raise self.error
            run_context.request_stop()


def test_one_bar_serves_several_trainings():
    bar, file = every_batch()
    step = fit(bar, micro_size=2)
    fit(bar, step, epochs=1)
    assert "8/8 batches" in file.getvalue()
    assert "4/4 batches" in drawn(file)[-1]
    assert "update 12," in drawn(file)[-1]


def test_a_stop_leaves_the_bar_where_it_is():
    bar, file = every_batch()
    fit(bar, epochs=5, callbacks=[Stop()], micro_size=2)
    assert "3/20 batches" in drawn(file)[-1]
    assert file.getvalue().endswith("\n")


def test_an_error_ends_the_line():
    bar, file = every_batch()
    with pytest.raises(ZeroDivisionError):
        fit(bar, epochs=5, callbacks=[Stop(ZeroDivisionError())], micro_size=2)
    assert "3/20 batches" in drawn(file)[-1]
    assert file.getvalue().endswith("\n")
    assert bar._bar is None


def test_a_training_that_begins_at_a_later_epoch():
    bar, file = every_batch()
    data = NumpySlicesDataset((X, Y), shuffle=False).batch(2)
    ms.Model(reused_step(micro_size=2)).train(4, data, callbacks=[bar], initial_epoch=2)
    assert drawn(file)[1].startswith("Epoch 3/4:")
    assert "8/8 batches" in drawn(file)[-1]


def test_data_sinking_moves_the_bar_by_sinks(pynative):
    """MindSpore sinks no data on CPU: the test makes the calls that it makes elsewhere, with a real step."""
    bar, file = every_batch()
    step = make_step(micro_size=2)
    parameters = _InternalCallbackParam()
    data = NumpySlicesDataset((X[:6], Y[:6]), shuffle=False).batch(2)
    parameters.update(train_network=step, batch_num=3, epoch_num=2, cur_step_num=0, dataset_sink_mode=True)
    parameters.update(train_dataset=data, train_dataset_element=(), list_callback=[bar])
    context = RunContext(parameters)
    bar.on_train_begin(context)
    for epoch in (1, 2):
        parameters.cur_epoch_num = epoch
        bar.on_train_epoch_begin(context)
        for number in range(3):
            window = slice(2 * number, 2 * number + 2)
            parameters.net_outputs = step(ms.Tensor(X[window]), ms.Tensor(Y[window]))
        parameters.cur_step_num += 3
        bar.on_train_step_end(context)
    bar.on_train_end(context)
    texts = drawn(file)
    assert any("3/6 batches" in text and "update 3," in text for text in texts)
    assert any("6/6 batches" in text and "update 6," in text and "samples/s" in text for text in texts)


@pytest.mark.distributed
def test_rank_0_alone_draws(rank_pair, tmp_path):
    first, second = (str(results["drawn"]) for results in rank_pair.worker("progress_worker", tmp_path))
    assert "8/8 batches" in first
    assert "update 4," in first
    assert second == ""


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"file": "log"}, TypeError, "'file' must be an open text file, but got 'log'"),
        ({"show": 1}, TypeError, "'show' must be a bool or None, but got 1"),
        ({"refresh_seconds": "1"}, TypeError, "'refresh_seconds' must be a float, but got '1'"),
        ({"refresh_seconds": True}, TypeError, "'refresh_seconds' must be a float, but got True"),
        ({"refresh_seconds": -1}, ValueError, "'refresh_seconds' must be finite and at least 0, but got -1"),
        ({"refresh_seconds": float("nan")}, ValueError, "must be finite and at least 0, but got nan"),
    ],
)
def test_bad_arguments_are_refused(options, error, text):
    with pytest.raises(error, match=re.escape(text)):
        ProgressBar(**options)


def test_another_network_is_refused():
    network = Line(1.0)
    model = ms.Model(network, optimizer=nn.SGD(network.trainable_params(), 0.1))
    with pytest.raises(ValueError, match="must be a GradAccumulationCell, but got 'TrainOneStepCell'"):
        model.train(1, NumpySlicesDataset((X, Y), shuffle=False).batch(2), callbacks=[ProgressBar()])
