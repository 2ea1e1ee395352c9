"""WindowMonitor: keeps each window's record, and writes JSON lines and TensorBoard's summaries."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mindspore.train import RunContext

from gaccum_ms.distributed.ranks import rank_or_0
from gaccum_ms.record.window_callback import WindowCallback
from gaccum_ms.record.window_record import WindowRecord


class WindowMonitor(WindowCallback):
    r"""
    Record each window: losses, counts, gradient norm, drops, loss scale, learning rate and time.

    ``records`` of this callback has a :class:`WindowRecord` for each window. With `count` and without
    `accumulation_steps` , each batch is a window: its loss and counts are the window's, over all ranks. Reading waits
    for the device after each batch, as with `LossMonitor` . Only rank 0 writes files.

    Args:
        json_lines (Union[str, Path], optional): A file to which each record is appended as a line of JSON; numbers
            that are not finite are ``null`` . Default: ``None`` .
        summary (SummaryWriter, optional): TensorBoard's, from tensorboardX or PyTorch. It receives each number, as
            ``window/<name>`` over the number of updates; with several losses also ``window/loss_terms/<n>`` . Close it
            yourself. Default: ``None`` .

    Raises:
        TypeError: If `json_lines` is neither str nor Path, or `summary` has another type.
        ValueError: If training begins with data sinking, which hides batches from callbacks, or without our step.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from gaccum_ms import GradAccumulationCell, WindowMonitor
        >>> net = nn.Dense(3, 1, weight_init="ones", bias_init="zeros")
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
        >>> cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), accumulation_steps=2)
        >>> x, y = np.ones((8, 3), np.float32), np.zeros((8, 1), np.float32)
        >>> data_set = ms.dataset.NumpySlicesDataset((x, y), shuffle=False).batch(2)
        >>> monitor = WindowMonitor()
        >>> ms.Model(cell, optimizer=optimizer).train(1, data_set, callbacks=[monitor])
        >>> for record in monitor.records:
        ...     print(record.update, record.batches, round(record.loss, 2), record.counts, record.count)
        1 2 9.0 (2.0, 2.0) 4.0
        2 2 0.36 (2.0, 2.0) 4.0
    """

    every_window = True

    def __init__(self, json_lines: str | Path | None = None, summary: Any = None) -> None:
        super().__init__()
        if json_lines is not None and not isinstance(json_lines, (str, Path)):
            raise TypeError(
                f"For 'WindowMonitor', the argument 'json_lines' must be a path, but got {json_lines!r} of type "
                f"'{type(json_lines).__name__}'."
            )
        if summary is not None and not hasattr(summary, "add_scalar"):
            raise TypeError(
                f"For 'WindowMonitor', the argument 'summary' must be TensorBoard's SummaryWriter, but got "
                f"'{type(summary).__name__}'."
            )
        self.records: list[WindowRecord] = []
        # Absolute, because the working folder may change in mid-training.
        self._path = None if json_lines is None else Path(json_lines).absolute()
        self._summary = summary

    def on_train_begin(self, run_context: RunContext) -> None:
        self._append("")  # a file that cannot be written is an error now, not after the first window

    def on_window_end(self, run_context: RunContext, record: WindowRecord) -> None:
        self.add(record)

    def add(self, record: WindowRecord) -> None:
        """Record a window of a loop of your own: what :meth:`GradAccumulator.record` returns.

        Args:
            record (WindowRecord): It is appended to ``records`` and written, as those of `ms.Model` are.
        """
        self.records.append(record)
        numbers = asdict(record)
        del numbers["noise"]  # `noise_scale` tells what it means
        self._append(json.dumps({name: _finite(value) for name, value in numbers.items()}) + "\n")
        if self._summary is not None and rank_or_0() == 0:
            for field, value in record.scalars().items():
                self._summary.add_scalar(f"window/{field}", value, record.update)

    def _append(self, text: str) -> None:
        """Append to the file, on rank 0. A last line that a killed training has cut short is ended before."""
        if self._path is None or rank_or_0() != 0:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.is_file() and self._path.stat().st_size:  # not a pipe, which has no last byte
            with self._path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    text = "\n" + text
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)


def _finite(value: Any) -> Any:
    """The value, with None for NaN and infinity, which JSON lacks."""
    if isinstance(value, tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
