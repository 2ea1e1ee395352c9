"""WindowMonitor: records each window for callbacks, JSON lines, TensorBoard and MindSpore's summaries."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore.train import Callback, RunContext

from gaccum_ms.callbacks.json_lines import append_json_line, begin_json_lines, json_lines_path
from gaccum_ms.callbacks.noise_estimate import SMOOTHING, NoiseEstimate
from gaccum_ms.callbacks.window_watch import samples_of_batch, training_step
from gaccum_ms.learning_rate import current_learning_rate
from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell


@dataclass(frozen=True)
class WindowRecord:
    """The record of one window: the fields are explained at `WindowMonitor` ."""

    update: int
    updated: bool
    epoch: int
    batches: int
    losses: tuple[float, ...]
    loss: float
    counts: tuple[float, ...]
    count: float | None
    loss_terms: tuple[float, ...] | None
    dropped_micro_batches: int
    grad_norm: float | None
    noise_scale: float | None
    loss_scale: float | None
    learning_rate: float
    seconds: float
    skipped_updates: int = 0


class WindowMonitor(Callback):
    r"""
    Record each window: losses, counts, gradient norm, drops, loss scale, learning rate and time.

    The fields of a record, in ``records`` of this callback:

    * ``update`` : updates made so far; ``updated`` : True if this window made one, False if it overflowed, was skipped
      or counted nothing.
    * ``epoch`` : the epoch in which it ended, from 1; ``batches`` : its number of batches, on this rank.
    * ``losses`` : each batch's mean, on this rank, for the batches of this training; ``loss`` : the window's mean, with
      `count` over all ranks.
    * ``counts`` : each batch's samples, or its `count` , on this rank; ``count`` : the total of the window's mean, over
      all ranks if ranks are weighted by counts.
    * ``loss_terms`` : with several losses, the mean of each, before `loss_weights` . ``counts`` then has one entry for
      each loss, and ``count`` is ``None`` , because they have no common total. ``None`` with one loss.
    * ``dropped_micro_batches`` : on all ranks.
    * ``grad_norm`` : before clipping; ``None`` without `max_grad_norm` and `record_noise` . With :class:`SkipSpikes`
      alone, it is the norm that was judged.
    * ``loss_scale`` : ``None`` without loss scaling.
    * ``noise_scale`` : in items, the estimate of :class:`GradNoiseScale` with its default `smoothing` ; ``None``
      without `record_noise` .
    * ``learning_rate`` : the update's rate, of the first parameter group.
    * ``seconds`` : from the beginning of the first batch to the end of the update.
    * ``skipped_updates`` : the updates that :class:`SkipSpikes` has skipped so far; 0 without it.

    With `count` and without `accumulation_steps` , each batch is a window: its loss and counts are the window's, over
    all ranks.

    Later callbacks find the record of a window that has just ended in
    ``run_context.original_args().window_record`` , which is ``None`` after other batches. Reading waits for the device
    after each batch, as with `LossMonitor` . Only rank 0 writes files.

    Args:
        json_lines (Union[str, Path], optional): A file to which each record is appended as a line of JSON; numbers
            that are not finite are ``null`` . Default: ``None`` .
        summary (Union[SummaryRecord, SummaryWriter], optional): Receives each number, as ``window/<name>`` over the
            number of updates; with several losses also ``window/loss_terms/<n>`` . It is a `mindspore.SummaryRecord` ,
            or TensorBoard's `SummaryWriter` from tensorboardX or PyTorch. Close it yourself. Default: ``None`` .

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

    def __init__(self, json_lines: str | Path | None = None, summary: Any = None) -> None:
        super().__init__()
        self._json_lines = json_lines_path("WindowMonitor", json_lines)
        if summary is not None and not isinstance(summary, ms.SummaryRecord) and not hasattr(summary, "add_scalar"):
            raise TypeError(
                f"For 'WindowMonitor', the argument 'summary' must be a mindspore.SummaryRecord or TensorBoard's "
                f"SummaryWriter, but got '{type(summary).__name__}'."
            )
        self.records: list[WindowRecord] = []
        self._summary = summary
        self._losses: list[float] = []
        self._counts: list[float] = []
        self._began = 0.0
        self._updates = 0  # the count before the next possible update
        self._skipped = 0  # likewise
        self._scale: float | None = None
        self._noise = NoiseEstimate()

    def on_train_begin(self, run_context: RunContext) -> None:
        parameters = run_context.original_args()
        step = training_step(run_context)
        if step is None or parameters.dataset_sink_mode:
            raise ValueError(
                f"For 'WindowMonitor', the trained network must be a GradAccumulationCell and 'dataset_sink_mode' "
                f"False, but got '{type(parameters.train_network).__name__}' and "
                f"dataset_sink_mode={parameters.dataset_sink_mode}."
            )
        self._losses, self._counts = [], []
        if self._json_lines is not None and step.run_record.rank == 0:
            begin_json_lines(self._json_lines)

    def on_train_step_begin(self, run_context: RunContext) -> None:
        step = training_step(run_context)
        if step is None:
            return
        if not self._losses:
            self._began = time.perf_counter()
        self._look(step)

    def on_train_step_end(self, run_context: RunContext) -> None:
        parameters, step = run_context.original_args(), training_step(run_context)
        parameters.window_record = None
        if step is None:
            return
        outputs = parameters.net_outputs
        if step.update.scaled:
            self._scale = _float(outputs[2])  # callbacks may have set it since the step's beginning
        self._losses.append(_float(outputs[0] if isinstance(outputs, tuple) else outputs))
        self._counts += _counts(step, samples_of_batch(run_context))
        if not int(step.window_position.asnumpy()):
            parameters.window_record = self._record(step, parameters.cur_epoch_num)
        self._look(step)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        """Prepare for a flush: callbacks may have changed the scale since the last batch."""
        step = training_step(run_context)
        if step is not None:
            self._look(step)

    on_train_end = on_train_epoch_end

    def on_window_flushed(self, run_context: RunContext) -> None:
        """Called by `FlushAccumulation` , several times on a rank with fewer batches than others."""
        parameters, step = run_context.original_args(), training_step(run_context)
        if step is not None and (self._losses or _number(step, "window_count")):  # else no rank had anything left
            parameters.window_record = self._record(step, parameters.cur_epoch_num)
            self._look(step)
            self._began = time.perf_counter()

    def _look(self, step: TrainOneStepWithGradAccumulationCell) -> None:
        """Note the values that the next update will change."""
        self._updates = int(step.update_count.asnumpy())
        self._skipped = int(_number(step, "skipped_updates") or 0)
        self._scale = _number(step, "scale_sense")
        if step.update.sens != 1.0:  # this scale is not checked for overflow, and the optimizer removes it
            self._scale = step.update.sens

    def _record(self, step: TrainOneStepWithGradAccumulationCell, epoch: int) -> WindowRecord:
        update = int(step.update_count.asnumpy())
        updated = update > self._updates
        skipped = int(_number(step, "skipped_updates") or 0)
        judged = updated or skipped > self._skipped  # else its norm is an older window's
        grad_norm = _number(step, "grad_norm")
        batches, terms = _number(step, "window_batches"), _numbers(step, "loss_terms")
        count = _number(step, "window_count")
        if count is None and terms is None:
            count = self._counts[-1]
        records_noise = hasattr(step, "noise_sums")
        if records_noise and updated:
            self._noise.keep(step.window.noise.read(float(step.grad_norm.asnumpy()), step.update.user_scale), SMOOTHING)
        record = WindowRecord(
            update=update,
            updated=updated,
            epoch=epoch,
            batches=len(self._losses) if batches is None else int(batches),
            losses=tuple(self._losses),
            loss=_float(step.window_loss) if step.spans_batches else self._losses[-1],
            counts=tuple(self._counts),
            count=count,
            loss_terms=None if terms is None else tuple(terms),
            dropped_micro_batches=int(_number(step, "dropped_micro_batches") or 0),
            grad_norm=_number(step, "judged_norm") if grad_norm is None and judged else grad_norm,
            noise_scale=self._noise.noise_scale if records_noise else None,
            loss_scale=self._scale,
            # Read late, because callbacks may have set it since the batch's beginning.
            learning_rate=current_learning_rate(step.optimizer, updates_ago=int(updated)),
            seconds=time.perf_counter() - self._began,
            skipped_updates=skipped,
        )
        self.records.append(record)
        self._losses, self._counts = [], []
        if step.run_record.rank == 0:
            self._write(record)
        return record

    def _write(self, record: WindowRecord) -> None:
        numbers = asdict(record)
        if self._json_lines is not None:
            append_json_line(self._json_lines, numbers)
        if self._summary is not None:
            scalars = {
                f"window/{name}": float(value)
                for name, value in numbers.items()
                if isinstance(value, (bool, int, float)) and name != "update"
            }
            scalars |= {f"window/loss_terms/{term}": loss for term, loss in enumerate(record.loss_terms or ())}
            for name, value in scalars.items():
                if isinstance(self._summary, ms.SummaryRecord):
                    self._summary.add_value("scalar", name, ms.Tensor(value, ms.float32))
                else:
                    self._summary.add_scalar(name, value, record.update)
            if isinstance(self._summary, ms.SummaryRecord):
                self._summary.record(record.update)


def _counts(step: TrainOneStepWithGradAccumulationCell, samples: int) -> list[float]:
    """The last batch's count, or its samples; with several losses, one count for each."""
    if step.spans_batches:
        return [_float(step.batch_items)]
    counts = _numbers(step, "window_count")
    # The window's count lacks the samples of dropped micro-batches, and includes other ranks'.
    return [float(samples)] if counts is None or step.window.weighs_samples else counts


def _float(tensor: ms.Tensor) -> float:
    return _shortest(tensor.asnumpy().reshape(-1)[0])


def _shortest(number: np.float32) -> float:
    """The shortest number that is this float32: 0.36, and not 0.36000001430511475 as with float()."""
    return float(str(number))


def _number(step: TrainOneStepWithGradAccumulationCell, name: str) -> float | None:
    numbers = _numbers(step, name)
    return numbers[0] if numbers is not None and len(numbers) == 1 else None


def _numbers(step: TrainOneStepWithGradAccumulationCell, name: str) -> list[float] | None:
    parameter = getattr(step, name, None)
    return None if parameter is None else [_shortest(one) for one in parameter.asnumpy().reshape(-1)]
