"""ProgressBar: the progress of a training, on a terminal or in a notebook."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from typing import Any, TextIO

import tqdm
from mindspore.train import Callback, RunContext

from gaccum_ms.checks.arguments import check_finite, check_one_of
from gaccum_ms.distributed.ranks import rank_or_0
from gaccum_ms.learning_rate import current_learning_rate
from gaccum_ms.record.window_notes import as_float, updates_of
from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell
from gaccum_ms.training.step_in_model import samples_of_batch, training_step

_NAME = "ProgressBar"
_FORMAT = "{desc} |{bar}| {n_fmt}/{total_fmt} {elapsed}<{remaining}{postfix}"
_FORMAT_WITH_SHORTEST_BAR = _FORMAT.replace("{bar}", " " * 4)


class ProgressBar(Callback):
    r"""
    One bar for the whole training: epoch, batches, time left, loss, learning rate, samples per second, norm, updates.

    It is shown on rank 0 if standard error is a terminal, and in notebooks. In logs and on other ranks, nothing is
    written and nothing is read from the device: use `WindowMonitor` or MindSpore's `LossMonitor` there. The output of
    launched ranks goes into logs, but the launcher passes on rank 0's standard output: there, use
    ``ProgressBar(sys.stdout, show=True)`` .

    `tqdm <https://tqdm.github.io>`_ draws the bar, which counts batches; its times are elapsed < left. It shows, as of
    the last batch: the loss of the last window, or of the last batch before a window of several has ended; the learning
    rate of the next update, of the first parameter group; this rank's samples per second since the last drawing, or
    with :class:`MaxTokens` its tokens that are not padding; with `max_grad_norm` , the norm before clipping; and the
    updates made. A narrow terminal does without the last of these. What other callbacks print appears above the bar.

    Reading loss and updates waits for the device, so they are read only when the bar is drawn, at most once in
    `refresh_seconds` . With data sinking, MindSpore calls callbacks once for each sink, and so the bar moves.

    Args:
        file (TextIO, optional): Where to write. Default: ``None`` , standard error, or in a notebook the cell's output.
        show (bool, optional): Whether to draw the bar on rank 0. Default: ``None`` , if `file` is a terminal, or in a
            notebook without `file` .
        refresh_seconds (float): Least time between two drawings, in seconds, at least 0. Default: ``0.5`` .

    Raises:
        TypeError: If `file` cannot be written to, or `refresh_seconds` is not a number.
        ValueError: If `show` is not a bool, or `refresh_seconds` is negative or not finite; if training begins without
            our step.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import io
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from gaccum_ms import GradAccumulationCell, ProgressBar
        >>> net = nn.Dense(3, 1)
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
        >>> cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), accumulation_steps=2)
        >>> x, y = np.ones((8, 3), np.float32), np.zeros((8, 1), np.float32)
        >>> data_set = ms.dataset.NumpySlicesDataset((x, y), shuffle=False).batch(2)
        >>> file = io.StringIO()
        >>> ms.Model(cell, optimizer=optimizer).train(3, data_set, callbacks=[ProgressBar(file, show=True)])
        >>> last = file.getvalue().split("\r")[-1]
        >>> print(last[:14], "12/12" in last, "update 6" in last)
        Epoch 3/3 |### True True
    """

    def __init__(self, file: TextIO | None = None, show: bool | None = None, refresh_seconds: float = 0.5) -> None:
        super().__init__()
        if file is not None and not hasattr(file, "write"):
            raise TypeError(f"For '{_NAME}', the argument 'file' must be an open text file, but got {file!r}.")
        check_one_of(_NAME, "show", show, (None, True, False))
        check_finite(_NAME, "refresh_seconds", refresh_seconds, 0)
        self._file = file
        self._show = show
        self._refresh_seconds = refresh_seconds
        self._bar: tqdm.tqdm | None = None  # while it is drawn
        self._at_end = contextlib.ExitStack()  # closes the bar, then restores standard output

    def on_train_begin(self, run_context: RunContext) -> None:
        parameters, step = run_context.original_args(), training_step(run_context)
        if step is None:
            raise ValueError(
                f"For '{_NAME}', the trained network must be a GradAccumulationCell, but got "
                f"'{type(parameters.train_network).__name__}'."
            )
        in_notebook = self._file is None and "ipykernel.zmqshell" in sys.modules
        stream = sys.stderr if self._file is None else self._file
        show = in_notebook or getattr(stream, "isatty", bool)() if self._show is None else self._show
        if rank_or_0() != 0 or not show:
            return
        self._step = step
        self._begun = parameters.cur_step_num  # batches before this training
        self._epochs = 0
        self._items = 0  # samples or tokens since the last drawing
        self._drawn = math.nan
        self._speed: list[str] = []

        from tqdm.auto import tqdm as auto_bar  # at its first use, because it may warn in a notebook

        bar_class: type[tqdm.tqdm] = auto_bar if self._file is None else tqdm.tqdm
        total = parameters.batch_num * parameters.epoch_num - parameters.get("skipped_batches", 0)
        bar = bar_class(total=total, file=stream, dynamic_ncols=True, desc="Epoch", bar_format=_FORMAT)
        if stream in (sys.stdout, sys.stderr):
            above = self._at_end.enter_context(contextlib.closing(_AboveBar(bar)))
            self._at_end.enter_context(contextlib.redirect_stdout(above))
        self._bar = self._at_end.enter_context(bar)

    def on_train_step_end(self, run_context: RunContext) -> None:
        if self._bar is None:
            return
        parameters = run_context.original_args()
        batches = parameters.cur_step_num - self._begun - self._bar.n
        items, self._unit = _items_of(run_context, self._step, batches)
        self._items += items
        self._epochs = self._epochs or parameters.cur_epoch_num - 1 + parameters.epoch_num
        self._bar.n += batches  # by `update` , tqdm would decide when to draw
        if not time.perf_counter() - self._drawn < self._refresh_seconds:  # the first is NaN
            self._draw(self._bar, parameters)

    def on_train_end(self, run_context: RunContext) -> None:
        if self._bar is not None and self._bar.n:
            self._draw(self._bar, run_context.original_args())
        self._close()

    def __exit__(self, *error: Any) -> None:
        if any(error):  # otherwise an evaluation of `Model.fit` has ended, or the bar is closed
            self._close()

    def _close(self) -> None:
        self._bar = None
        self._at_end.close()

    def _draw(self, bar: tqdm.tqdm, parameters: Any) -> None:
        numbers = _numbers(self._step, parameters.net_outputs)
        now = time.perf_counter()  # after reading, for which the device had to finish the counted batches
        if self._items and now > self._drawn:  # False for the first batch, which waited for the compiler
            self._speed = [f"{self._items / (now - self._drawn):.0f} {self._unit}/s"]
        bar.set_description_str(f"Epoch {parameters.cur_epoch_num}/{self._epochs}", refresh=False)
        texts = [*numbers[:2], *self._speed, *numbers[2:]]
        for count in range(len(texts), -1, -1):  # as many as leave room for the bar
            bar.set_postfix_str(", ".join(texts[:count]), refresh=False)
            columns = bar.format_dict["ncols"]
            whole = bar.format_dict | {"ncols": None, "bar_format": _FORMAT_WITH_SHORTEST_BAR}
            if not isinstance(columns, int) or len(bar.format_meter(**whole)) <= columns:
                break
        bar.refresh()
        self._drawn, self._items = time.perf_counter(), 0


class _AboveBar:
    """Standard output, whose complete lines appear above the bar."""

    def __init__(self, bar: tqdm.tqdm) -> None:
        self._bar, self._stream, self._line = bar, sys.stdout, ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        if lines:
            with self._bar.external_write_mode(self._bar.fp):
                print(*lines, sep="\n", file=self._stream, flush=True)
        return len(text)

    def close(self) -> None:
        self._stream.write(self._line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _items_of(run_context: RunContext, step: TrainOneStepWithGradAccumulationCell, batches: int) -> tuple[int, str]:
    """What the last batch, or those of a sink, hold: this many samples or tokens."""
    parameters = run_context.original_args()
    plan = step.split.plan if step.split is not None else None
    if parameters.dataset_sink_mode:
        return batches * parameters.train_dataset.get_batch_size(), "samples"
    return (samples_of_batch(run_context), "samples") if plan is None else (plan.tokens, "tokens")


def _numbers(step: TrainOneStepWithGradAccumulationCell, outputs: Any) -> list[str]:
    updates = updates_of(step)
    loss = outputs[0] if isinstance(outputs, tuple) else outputs
    if step.spans_batches and updates:
        loss = step.window_loss
    numbers = [f"loss {as_float(loss):.4g}", f"lr {current_learning_rate(step.optimizer):.4g}"]
    if updates and hasattr(step, "grad_norm"):
        numbers.append(f"norm {as_float(step.grad_norm):.4g}")
    return [*numbers, f"update {updates}"]
