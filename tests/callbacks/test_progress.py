"""ProgressBar: what a real training draws, and when it draws nothing."""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import json
import os
import re
import struct
import sys
import termios
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import Callback, LambdaCallback, LossMonitor

from gaccum_ms import FlushAccumulation, ProgressBar
from gaccum_ms.callbacks import progress
from tests.accumulation.test_windows import Evaluation
from tests.support.reference import Line, make_step
from tests.support.reuse import Reused

X = np.array([1, 2, 4, 1, 2, 4, 3], np.float32)
Y = np.array([0, 1, 1, 0, 1, 1, 2], np.float32)


@Reused
def reused_step(**options):
    return make_step(Line(1.0), lambda weights: nn.SGD(weights, 0.01), **options)


def data_set():
    """Seven samples, in four batches."""
    return NumpySlicesDataset((X, Y), shuffle=False).batch(2)


def fit(bar, epochs=2, callbacks=(), initial_epoch=0, **options):
    step = reused_step(**(options or {"micro_size": 2}))
    ms.Model(step).train(epochs, data_set(), callbacks=[bar, *callbacks], initial_epoch=initial_epoch)


def drawn(written):
    """The texts that were drawn."""
    return [text for text in re.split(r"[\r\n]+", written) if text.strip()]


def every_batch():
    file = io.StringIO()
    return ProgressBar(file, show=True, refresh_seconds=0), file


def test_each_batch_is_drawn_with_its_numbers(pynative):
    """Windows of three batches, by hand at w = 1, and one that is flushed at the end."""
    bar, file = every_batch()
    fit(bar, epochs=1, callbacks=[FlushAccumulation()], accumulation_steps=3, max_grad_norm=100.0)
    texts = drawn(file.getvalue())
    assert len(texts) == 1 + 4 + 2, "the empty bar, each batch, and the end"
    assert texts[1].startswith("Epoch 1/1 |")
    assert re.search(r" 1/4 00:\d\d<.*, loss 0.5, lr 0.01, update 0$", texts[1])  # x = 1, 2 and y = 0, 1
    assert "samples/s" not in texts[1]  # that batch waited for the compiler
    # x = 1, 2, 4, 1, 2, 4: losses 0.5, 0.5, 4.5, 0.5, 0.5, 4.5 and gradients 1, 2, 12, 1, 2, 12
    assert re.search(r" 3/4 .*, loss 1.833, lr 0.01, \d+ samples/s, norm 5, update 1$", texts[3])
    assert re.search(r" 4/4 .* samples/s, .* update 2$", texts[-1])
    assert file.getvalue().endswith("\n")


def test_a_speed_is_that_since_the_last_drawing(monkeypatch, pynative):
    """By a clock that goes on by a second whenever it is read, as twice between two drawings of two samples. Without
    windows and clipping there is the batch's loss, and no norm."""
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    bar, file = every_batch()
    fit(bar, epochs=4, initial_epoch=3)
    assert re.findall(r"(\d+) samples/s", file.getvalue())[:2] == ["1", "1"]
    texts = drawn(file.getvalue())
    assert re.search(r"^Epoch 4/4 .* 1/4 .*, loss 0.5, lr 0.01, update 1$", texts[1])
    assert "norm" not in file.getvalue()


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Print(Callback):
    def on_train_step_end(self, run_context):
        print("batch", run_context.original_args().cur_step_num)

    def on_train_end(self, run_context):
        print("incomplete", end="")


def test_the_bar_outlives_evaluations_below_what_others_print(pynative):
    """Two epochs of four batches, each evaluated; MindSpore's callback prints the results."""
    step = reused_step(micro_size=2)
    model = ms.Model(step, eval_network=Evaluation(step.network), metrics={"mae"}, eval_indexes=[0, 1, 2])
    output, terminal = sys.stdout, Terminal()
    with contextlib.redirect_stdout(terminal):
        bar = ProgressBar(terminal, refresh_seconds=0)
        model.fit(2, data_set(), data_set(), callbacks=[bar, Print(), LossMonitor(4)])
        assert sys.stdout is terminal, "and not what puts lines above the bar"
    assert sys.stdout is output
    lines = [line.rpartition("\r")[2] for line in terminal.getvalue().split("\n")]
    results = [[f"epoch: {epoch} step: 4, loss is", f"Eval result: epoch {epoch}, "] for epoch in (1, 2)]
    batches = [[f"batch {number}" for number in numbers] for numbers in (range(1, 5), range(5, 9))]
    expected = [*batches[0], *results[0], *batches[1], *results[1]]
    assert [line[: len(start)] for line, start in zip(lines, expected, strict=False)] == expected
    assert lines[len(expected)].startswith("Epoch 2/2 |")
    assert lines[len(expected) + 1 :] == ["incomplete"]
    assert all(f"| {number}/8 " in terminal.getvalue() for number in range(9)), "a bar for each batch"


def test_a_narrow_terminal_does_without_the_last_numbers(pynative):
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 35, 0, 0))
    with open(slave, "w") as terminal:
        fit(ProgressBar(terminal))
    written = b""
    with contextlib.suppress(OSError):  # at the end
        while True:
            written += os.read(master, 1 << 16)
    os.close(master)
    last = drawn(written.decode())[-1]
    assert 33 <= len(last) <= 35
    assert re.match(r"Epoch 2/2 \|███.*\| 8/8 .*<", last)
    assert "loss" not in last


NOTEBOOK = """
import mindspore as ms
import numpy as np
from gaccum_ms import GradAccumulationCell, ProgressBar

net = ms.nn.Dense(1, 1)
cell = GradAccumulationCell(ms.nn.WithLossCell(net, ms.nn.MSELoss()), 2)
model = ms.Model(cell, optimizer=ms.nn.SGD(cell.trainable_params(), 0.01))
data = ms.dataset.NumpySlicesDataset((np.ones((8, 1), np.float32),) * 2).batch(2)
model.train(2, data, callbacks=[ProgressBar(refresh_seconds=0)])
"""


def test_a_notebook_shows_the_bar_as_a_widget():
    """A kernel runs the cell, as in a notebook."""
    for module in ("ipykernel", "ipywidgets"):
        pytest.importorskip(module, reason=f"{module} is in the extra 'test'")
    from jupyter_client.manager import run_kernel

    messages = []
    with run_kernel() as client:
        client.execute_interactive(NOTEBOOK, timeout=300, output_hook=messages.append)
    texts = json.dumps([message["content"] for message in messages], ensure_ascii=False, default=str)
    assert "application/vnd.jupyter.widget-view+json" in texts
    assert all(f" {number}/8 " in texts.replace("\u2007", " ") for number in range(9)), texts  # tqdm's space in HTML


def test_the_device_is_read_only_when_a_bar_is_drawn(capfd, monkeypatch, pynative):
    """On rank 0, on a terminal, or where the user asks."""
    reads, log = [], io.StringIO()
    original = progress._numbers
    monkeypatch.setattr(progress, "_numbers", lambda *of: reads.append(1) or original(*of))
    for bar in (ProgressBar(), ProgressBar(log), ProgressBar(log, show=False)):
        fit(bar, epochs=1)  # pytest's standard error is a file
    with monkeypatch.context() as patch:
        patch.setattr(progress, "rank_or_0", lambda: 1)
        fit(ProgressBar(log, show=True), epochs=1)
    captured = capfd.readouterr()
    assert "Epoch" not in captured.out + captured.err + log.getvalue()
    assert not reads
    file = io.StringIO()
    fit(ProgressBar(file, show=True, refresh_seconds=1000), epochs=3)
    assert len(reads) == 2  # the first batch, and the end
    assert "| 12/12 " in drawn(file.getvalue())[-1]


def fail_at_3(run_context):
    1 / (run_context.original_args().cur_step_num - 3)


def test_an_error_leaves_the_bar_where_it_is_and_the_next_training_has_its_own(pynative):
    bar, file = every_batch()
    with pytest.raises(ZeroDivisionError):
        fit(bar, epochs=5, callbacks=[LambdaCallback(on_train_step_end=fail_at_3)])
    assert "| 3/20 " in drawn(file.getvalue())[-1]
    assert file.getvalue().endswith("\n")
    fit(bar)
    assert "| 8/8 " in drawn(file.getvalue())[-1]


def test_bad_arguments_are_refused():
    for options, error, text in (
        ({"file": "log"}, TypeError, "'file' must be an open text file, but got 'log'"),
        ({"show": 1}, ValueError, r"'show' must be one of \[None, True, False\], but got 1"),
        ({"refresh_seconds": float("nan")}, ValueError, "'refresh_seconds' must be finite and at least 0, but got nan"),
    ):
        with pytest.raises(error, match=text):
            ProgressBar(**options)
