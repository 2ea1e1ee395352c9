"""ProgressBar: what a real training draws, on a pseudo-terminal and into a file, and when it draws nothing."""

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
from mindspore.train import Callback, LambdaCallback, LossMonitor, RunContext
from mindspore.train.callback import _InternalCallbackParam

from gaccum_ms import FlushAccumulation, ProgressBar
from tests.accumulation.test_windows import Evaluation, StopAt
from tests.support import reference
from tests.support.reference import Line
from tests.support.reuse import Reused

X = np.array([1, 2, 4, 1, 2, 4, 3], np.float32)
Y = np.array([0, 1, 1, 0, 1, 1, 2], np.float32)


def make_step(rate=0.01, **options):
    return reference.make_step(Line(1.0), lambda weights: nn.SGD(weights, rate), **options)


reused_step = Reused(make_step)


def fit(bar, step=None, epochs=2, callbacks=(), initial_epoch=0, **options):
    """Seven samples, in four batches."""
    step = step or reused_step(**options)
    data = NumpySlicesDataset((X, Y), shuffle=False).batch(2)
    ms.Model(step).train(epochs, data, callbacks=[bar, *callbacks], initial_epoch=initial_epoch)
    return step


def drawn(file):
    """The texts that were drawn."""
    return [text for text in re.split(r"[\r\n]+", file.getvalue()) if text.strip()]


def every_batch(**options):
    file = io.StringIO()
    return ProgressBar(file, show=True, refresh_seconds=0, **options), file


def test_each_batch_is_drawn_with_its_numbers(pynative):
    """Windows of two batches, by hand at w = 1: the first two batches have the losses 0.5 and 2.5."""
    bar, file = every_batch()
    step = fit(bar, make_step(accumulation_steps=2, max_grad_norm=100.0))
    texts = drawn(file)
    assert len(texts) == 1 + 8 + 2, "the empty bar, each batch, and the end"
    assert texts[1].startswith("Epoch 1/2 |")
    assert re.search(r" 1/8 00:\d\d<.*, loss 0.5, lr 0.01, update 0$", texts[1])  # x = 1, 2 and y = 0, 1
    assert "samples/s" not in texts[1]  # that batch waited for the compiler
    # x = 1, 2, 4, 1: losses 0.5, 0.5, 4.5, 0.5 and gradients 1, 2, 12, 1
    assert re.search(r" 2/8 .*, loss 1.5, lr 0.01, \d+ samples/s, norm 4, update 1$", texts[2])
    assert re.search(r"^Epoch 2/2 .* 5/8 ", texts[5])
    assert re.search(rf" 8/8 .* samples/s, .* update {int(step.update_count.asnumpy())}$", texts[-1])
    assert file.getvalue().endswith("\n")


def test_a_speed_is_that_since_the_last_drawing(monkeypatch, pynative):
    """By a clock that goes on by a second whenever it is read, as twice between two drawings of two samples."""
    monkeypatch.setattr("gaccum_ms.callbacks.progress.time", SimpleNamespace(perf_counter=itertools.count().__next__))
    bar, file = every_batch()
    fit(bar, micro_size=2)
    assert re.findall(r"(\d+) samples/s", file.getvalue())[:2] == ["1", "1"]


def test_without_windows_and_clipping_the_batchs_loss_and_no_norm(pynative):
    """With loss scaling: the step returns a tuple."""
    bar, file = every_batch()
    scale, rates = nn.FixedLossScaleUpdateCell(1024), [0.1, 0.2, 0.3, 0.4, 0.5]
    fit(bar, make_step(rate=rates, scale_sense=scale, micro_size=2), epochs=1)
    texts = drawn(file)
    assert re.search(r" 1/4 .*, loss 0.5, lr 0.2, update 1$", texts[1])
    assert all("norm" not in text for text in texts)


def test_the_end_shows_a_flush(pynative):
    bar, file = every_batch()
    fit(bar, epochs=1, callbacks=[FlushAccumulation()], accumulation_steps=3)
    assert re.search(r" 4/4 .* update 2$", drawn(file)[-1])


def on_a_terminal(columns, train):
    """What `train` writes to standard output and standard error, if both are a terminal of this width."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with (
        open(os.dup(slave), "w") as out,
        open(slave, "w") as error,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(error),
    ):
        train()
    written = b""
    with contextlib.suppress(OSError):  # raised when the other end is closed
        while data := os.read(master, 1 << 16):
            written += data
    os.close(master)
    return written.decode().replace("\r\n", "\n")


def screen(written):
    """The lines that a terminal shows, when parts of a line are written over each other."""
    lines = []
    for line in written.split("\n"):
        text = ""
        for part in line.split("\r"):
            text = part + text[len(part) :]
        lines.append(text.rstrip())
    return lines


class Print(Callback):
    def on_train_step_end(self, run_context):
        print("batch", run_context.original_args().cur_step_num)

    def on_train_end(self, run_context):
        print("incomplete", end="")


@pytest.mark.core(is_first=True)
@pytest.mark.parametrize("is_first", [True, False])
def test_the_bar_outlives_evaluations_below_what_others_print(is_first, pynative):
    """Two epochs of four batches on 70 columns, each evaluated; MindSpore's callback prints the results."""
    step = reused_step(micro_size=2)
    model = ms.Model(step, eval_network=Evaluation(step.network), metrics={"mae"}, eval_indexes=[0, 1, 2])
    bar, others = ProgressBar(refresh_seconds=0), [Print(), LossMonitor(4)]
    data = [NumpySlicesDataset((X, Y), shuffle=False).batch(2) for _ in range(2)]
    output = sys.stdout
    written = on_a_terminal(70, lambda: model.fit(2, *data, callbacks=[bar, *others] if is_first else [*others, bar]))
    lines = screen(written)
    batches = [[f"batch {number}" for number in numbers] for numbers in (range(1, 5), range(5, 9))]
    results = [[f"epoch: {epoch} step: 4, loss is", f"Eval result: epoch {epoch}, "] for epoch in (1, 2)]
    expected = [*batches[0], *results[0], *batches[1], *results[1]]
    assert [line[: len(start)] for line, start in zip(lines, expected, strict=False)] == expected
    assert re.fullmatch(r"Epoch 2/2 \|█{4,}\| 8/8 \S+, loss \S+, lr 0.01(, \d+ samples/s)?", lines[-2])
    assert len(lines) == len(expected) + 2
    assert lines[-1] == "incomplete"
    assert all(f"| {number}/8 " in written for number in range(9)), "a bar for each batch"
    assert max(map(len, re.split(r"[\r\n]", written))) <= 70
    assert sys.stdout is output


@pytest.mark.parametrize(("columns", "number"), [(120, 7), (35, 2)])
def test_a_narrow_terminal_does_without_the_last_numbers(columns, number, pynative):
    written = on_a_terminal(columns, lambda: fit(ProgressBar(), micro_size=2, max_grad_norm=100.0))
    (last,) = filter(None, screen(written))
    assert columns - 2 <= len(last) <= columns
    parts = ["| 8/8 ", "<", "loss", "lr 0.01", "samples/s", "norm", "update 8"]
    assert [part for part in parts if part in last] == parts[:number], last
    assert last.startswith("Epoch 2/2 |███")


NOTEBOOK = """
import mindspore as ms
import numpy as np
from mindspore import nn
from gaccum_ms import GradAccumulationCell, ProgressBar

net, loss = nn.Dense(1, 1), nn.MSELoss()
cell = GradAccumulationCell(nn.WithLossCell(net, loss), 2)
optimizer = nn.SGD(cell.trainable_params(), 0.01)
evaluated = {"eval_network": nn.WithEvalCell(net, loss), "metrics": {"mae"}, "eval_indexes": [0, 1, 2]}
model = ms.Model(cell, optimizer=optimizer, **evaluated)
x = np.ones((8, 1), np.float32)
data = [ms.dataset.NumpySlicesDataset((x, x), shuffle=False).batch(2) for _ in range(2)]
model.fit(2, *data, callbacks=[ProgressBar(refresh_seconds=0)])
"""


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("before", ["", "import sys; sys.modules['ipywidgets'] = None"])
def test_a_notebook_shows_the_bar(before):
    """As a widget, or as text where ipywidgets are missing. A kernel runs the cell, as in a notebook."""
    for module in ("ipykernel", "ipywidgets"):
        pytest.importorskip(module, reason=f"{module} is in the extra 'test'")
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel()
    messages = []
    try:
        client.execute_interactive(f"{before}\n{NOTEBOOK}", timeout=300, output_hook=messages.append)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    contents = [message["content"] for message in messages]
    is_widget = any("application/vnd.jupyter.widget-view+json" in content.get("data", ()) for content in contents)
    assert is_widget == (not before)
    texts = json.dumps(contents, ensure_ascii=False, default=str).replace("\u2007", " ")  # tqdm's space in HTML
    assert "Epoch 2/2 " in texts
    assert all(f" {number}/8 " in texts for number in range(9)), texts


def never(*_):
    raise AssertionError("a bar that is not drawn must not read anything")


def test_nothing_is_written_or_read_where_there_is_no_terminal(capfd, monkeypatch, tmp_path, pynative):
    monkeypatch.setattr("gaccum_ms.callbacks.progress._numbers", never)
    fit(ProgressBar(), micro_size=2)  # pytest's standard error is a file
    with (tmp_path / "log").open("w") as log:
        fit(ProgressBar(log), micro_size=2)
    fit(ProgressBar(io.StringIO(), show=False), micro_size=2)
    captured = capfd.readouterr()
    assert "Epoch" not in captured.out + captured.err
    assert (tmp_path / "log").read_text() == ""


def test_the_device_is_read_only_when_the_bar_is_drawn(monkeypatch, pynative):
    reads = []
    original = ProgressBar.on_train_step_end.__globals__["_numbers"]
    monkeypatch.setattr("gaccum_ms.callbacks.progress._numbers", lambda *of: reads.append(1) or original(*of))
    file = io.StringIO()
    fit(ProgressBar(file, show=True, refresh_seconds=1000), micro_size=2, epochs=3)
    assert len(reads) == 2  # the first batch, and the end
    assert "| 12/12 " in drawn(file)[-1]
    bar, file = every_batch()
    fit(bar, micro_size=2, epochs=3)
    assert len(reads) == 2 + 12 + 1


def test_one_bar_serves_several_trainings_also_one_that_begins_at_a_later_epoch(pynative):
    bar, file = every_batch()
    step = fit(bar, micro_size=2)
    assert "| 8/8 " in file.getvalue()
    fit(bar, step, epochs=4, initial_epoch=3)
    assert re.search(r"^Epoch 4/4 .* 4/4 .* update 12$", drawn(file)[-1])


def fail_at_3(run_context):
    1 / (run_context.original_args().cur_step_num - 3)


@pytest.mark.parametrize("end", [StopAt(step=3), LambdaCallback(on_train_step_end=fail_at_3)], ids=["stop", "error"])
def test_a_stop_or_an_error_leaves_the_bar_where_it_is(end, pynative):
    bar, file = every_batch()
    with contextlib.suppress(ZeroDivisionError):
        fit(bar, epochs=5, callbacks=[end], micro_size=2)
    assert "| 3/20 " in drawn(file)[-1]
    assert file.getvalue().endswith("\n")


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
        for number in range(3):
            window = slice(2 * number, 2 * number + 2)
            parameters.net_outputs = step(ms.Tensor(X[window]), ms.Tensor(Y[window]))
        parameters.cur_step_num += 3
        bar.on_train_step_end(context)
    bar.on_train_end(context)
    texts = drawn(file)
    assert re.search(r" 3/6 .* update 3$", texts[1])
    assert re.search(r" 6/6 .* samples/s, update 6$", texts[2])


@pytest.mark.distributed
def test_rank_0_alone_draws(rank_pair, tmp_path):
    first, second = (str(results["drawn"]) for results in rank_pair.worker("tests.ranks.callbacks_worker", tmp_path))
    assert re.search(r" 8/8 .* update 4\s*$", first)
    assert second == ""


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"file": "log"}, TypeError, "'file' must be an open text file, but got 'log'"),
        ({"show": 1}, ValueError, "'show' must be one of [None, True, False], but got 1"),
        ({"refresh_seconds": "1"}, TypeError, "'refresh_seconds' must be a float, but got '1'"),
        ({"refresh_seconds": -1}, ValueError, "'refresh_seconds' must be finite and at least 0, but got -1"),
        ({"refresh_seconds": float("nan")}, ValueError, "'refresh_seconds' must be finite and at least 0, but got nan"),
    ],
)
def test_bad_arguments_are_refused(options, error, text):
    with pytest.raises(error, match=re.escape(text)):
        ProgressBar(**options)
