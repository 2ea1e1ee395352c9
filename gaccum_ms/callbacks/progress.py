"""ProgressBar: the progress of a training, on a terminal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from mindspore.train import Callback, RunContext
from tqdm import tqdm

from gaccum_ms.callbacks.window_watch import samples_of_batch, skipped_batches, training_step
from gaccum_ms.distributed.ranks import rank_or_0
from gaccum_ms.learning_rate import current_learning_rate
from gaccum_ms.splitting.token_plan import TokenPlan
from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell

_NAME = "ProgressBar"
# The parts that a narrow terminal leaves out, in this order. "words" are explanations such as "samples". The number of
# batches is always shown.
_LEAST_IMPORTANT_FIRST = (
    *("bar", "percentage", "elapsed", "words", "update", "epoch"),
    *("speed", "norm", "rate", "left", "loss"),
)
_LEAST_BAR = 4  # columns


class ProgressBar(Callback):
    r"""
    One bar for the whole training: epoch, batches, updates, loss, learning rate, norm, samples per second, time left.

    It is shown on rank 0 if standard error is a terminal. In logs and on other ranks, nothing is written and nothing is
    read from the device: use `WindowMonitor` or MindSpore's `LossMonitor` there. The output of launched ranks goes into
    logs, but the launcher passes on rank 0's standard output: there, use ``ProgressBar(sys.stdout, show=True)`` .

    The bar counts batches. It shows, as of the last batch: updates made; the loss of the last window, or of the last
    batch before a window of several has ended; the learning rate of the next update, of the first parameter group; with
    `max_grad_norm` , the norm before clipping; and this rank's samples per second since the last drawing, or with
    :class:`MaxTokens` its tokens that are not padding.
    `tqdm <https://tqdm.github.io>`_ draws the bar; its times are elapsed < left.

    On a narrow terminal the least important parts are left out, in this order: the bar itself, the percentage, the
    elapsed time, words, updates, the epoch, and only then speed, norm, learning rate, the time left and the loss.

    Reading loss and updates waits for the device, so they are read only when the bar is drawn, at most once in
    `refresh_seconds` . With data sinking, MindSpore calls callbacks once for each sink, and so the bar moves.

    Args:
        file (TextIO, optional): Where to write. Default: ``None`` , standard error.
        show (bool, optional): Whether to draw the bar on rank 0. Default: ``None`` , if `file` is a terminal.
        refresh_seconds (float): Least time between two drawings, in seconds, at least 0. Default: ``0.5`` .

    Raises:
        TypeError: If `file` cannot be written to, `show` is not a bool, or `refresh_seconds` not a number.
        ValueError: If `refresh_seconds` is negative or not finite; if training begins without our step.

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
        >>> print(last[:19], "12/12 batches" in last, "update 6" in last)
        Epoch 3/3: 100%|### True True
    """

    def __init__(self, file: TextIO | None = None, show: bool | None = None, refresh_seconds: float = 0.5) -> None:
        super().__init__()
        if file is not None and not hasattr(file, "write"):
            raise TypeError(
                f"For '{_NAME}', the argument 'file' must be an open text file, but got {file!r} of type "
                f"'{type(file).__name__}'."
            )
        if show is not None and not isinstance(show, bool):
            raise TypeError(f"For '{_NAME}', the argument 'show' must be a bool or None, but got {show!r}.")
        if isinstance(refresh_seconds, bool) or not isinstance(refresh_seconds, (int, float)):
            raise TypeError(
                f"For '{_NAME}', the argument 'refresh_seconds' must be a float, but got {refresh_seconds!r} of type "
                f"'{type(refresh_seconds).__name__}'."
            )
        if not (math.isfinite(refresh_seconds) and refresh_seconds >= 0):
            raise ValueError(
                f"For '{_NAME}', the argument 'refresh_seconds' must be finite and at least 0, but got "
                f"{refresh_seconds}."
            )
        self._file = file
        self._show = show
        self._refresh_seconds = refresh_seconds
        self._bar: tqdm | None = None
        self._begun = 0  # batches before this training, in MindSpore's count
        self._batches = 0  # batches of this training, at MindSpore's last call
        self._items = 0  # samples or tokens since the last drawing
        self._drawn = math.nan
        self._speed: dict[str, str] = {}
        self._epochs = 0

    def on_train_begin(self, run_context: RunContext) -> None:
        parameters = run_context.original_args()
        if training_step(run_context) is None:
            raise ValueError(
                f"For '{_NAME}', the trained network must be a GradAccumulationCell, but got "
                f"'{type(parameters.train_network).__name__}'."
            )
        file = sys.stderr if self._file is None else self._file
        shown = _is_terminal(file) if self._show is None else self._show
        if not shown or rank_or_0() != 0:
            return
        total = parameters.batch_num * parameters.epoch_num - skipped_batches(parameters)
        self._begun, self._batches, self._items = parameters.cur_step_num, 0, 0
        self._drawn, self._speed, self._epochs = math.nan, {}, 0
        # This class decides when to draw, not tqdm: miniters, mininterval, and a delay that suppresses the first bar.
        self._bar = tqdm(total=total, file=file, dynamic_ncols=True, miniters=0, mininterval=0, delay=1, desc="Epoch")
        self._bar.delay = 0
        self._bar.bar_format = _fitting(self._bar, {})
        self._bar.refresh()

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        parameters = run_context.original_args()
        if not self._epochs:
            self._epochs = parameters.cur_epoch_num - 1 + parameters.epoch_num

    def on_train_step_end(self, run_context: RunContext) -> None:
        if self._bar is None:
            return
        parameters = run_context.original_args()
        batches = parameters.cur_step_num - self._begun
        if parameters.dataset_sink_mode:
            self._items += (batches - self._batches) * parameters.train_dataset.get_batch_size()
        elif (plan := _token_plan(run_context)) is not None:
            self._items += plan.tokens
        else:
            self._items += samples_of_batch(run_context)
        self._batches = batches
        if not time.perf_counter() - self._drawn < self._refresh_seconds:  # the first is NaN
            self._draw(self._bar, run_context)

    def on_train_end(self, run_context: RunContext) -> None:
        if self._bar is not None:
            self._draw(self._bar, run_context)
        self._close()

    def __exit__(self, *error: Any) -> None:
        self._close()  # also after a failure

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _draw(self, bar: tqdm, run_context: RunContext) -> None:
        parameters, step = run_context.original_args(), training_step(run_context)
        numbers = {} if step is None else _numbers(step, parameters.get("net_outputs"))
        now = time.perf_counter()  # after reading, for which the device had to finish the counted batches
        if self._items and now > self._drawn:  # False for the first batch, which waited for the compiler
            items = "samples" if _token_plan(run_context) is None else "tokens"
            self._speed = {"speed": f"{self._items / (now - self._drawn):.0f} {items}/s"}
        bar.set_description_str(f"Epoch {parameters.get('cur_epoch_num')}/{self._epochs}", refresh=False)
        bar.bar_format = _fitting(bar, numbers | self._speed)
        if not bar.update(self._batches - bar.n):
            bar.refresh()
        self._drawn, self._items = time.perf_counter(), 0


def _fitting(bar: tqdm, numbers: dict[str, str]) -> str:
    """The longest format of the bar that fits its terminal; if none fits, the shortest."""
    shown = bar.format_dict
    columns, shown["ncols"] = shown["ncols"], None
    for count in range(len(_LEAST_IMPORTANT_FIRST) + 1):
        text = _format(numbers, _LEAST_IMPORTANT_FIRST[:count])
        length = len(bar.format_meter(**shown | {"bar_format": text.replace("{bar}", " " * _LEAST_BAR)}))
        if not columns or length <= columns:
            break
    return text


def _format(numbers: dict[str, str], left_out: Sequence[str]) -> str:
    """The format of a bar without some of its parts."""
    parts = {"epoch": "{desc}: ", "percentage": "{percentage:3.0f}%", "bar": "|{bar}| ", "words": " batches"}
    parts |= {"elapsed": "{elapsed}", "left": "<{remaining}"}
    parts |= dict.fromkeys(left_out, "")
    gap = " " if parts["percentage"] and not parts["bar"] else ""
    kept = [text for name, text in numbers.items() if name not in left_out]
    if "words" in left_out:
        kept = [text.replace(" samples/s", "/s").replace(" tokens/s", "/s") for text in kept]
    inside = ", ".join(filter(None, [parts["elapsed"] + parts["left"], *kept]))
    where = f"{parts['epoch']}{parts['percentage']}{parts['bar']}{gap}{{n_fmt}}/{{total_fmt}}{parts['words']}"
    return f"{where} [{inside}]" if inside else where


def _numbers(step: TrainOneStepWithGradAccumulationCell, outputs: Any) -> dict[str, str]:
    updates = int(step.update_count.asnumpy())
    loss = outputs[0] if isinstance(outputs, tuple) else outputs
    if step.spans_batches and updates:
        loss = step.window_loss
    numbers = {"update": f"update {updates}"}
    if loss is not None:
        numbers["loss"] = f"loss {_last(loss):.4g}"
    numbers["rate"] = f"lr {current_learning_rate(step.optimizer):.4g}"
    if updates and hasattr(step, "grad_norm"):
        numbers["norm"] = f"norm {_last(step.grad_norm):.4g}"
    return numbers


def _token_plan(run_context: RunContext) -> TokenPlan | None:
    """The layout of the last batch, if micro-batches are made by length."""
    step = training_step(run_context)
    return step.options.split.plan if step is not None and step.options.splits_in_python else None


def _last(tensor: Any) -> float:
    return float(tensor.asnumpy().reshape(-1)[-1])


def _is_terminal(file: TextIO) -> bool:
    return hasattr(file, "isatty") and file.isatty()
