"""FlushAccumulation: ends the window that is open when an epoch or the training ends.

Ranks with fewer batches than others (window_watch.py compares them before training) then take part in the missing
updates, first with their remaining batches, then with counts of zero.
"""

from __future__ import annotations

from typing import Any

from mindspore.communication import get_rank
from mindspore.train import Callback, RunContext

from gaccum_ms.checks.arguments import check_bool
from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell
from gaccum_ms.training.step_in_model import training_step


class FlushAccumulation(Callback):
    r"""
    Update with the remaining batches when an epoch ends, instead of keeping the window open.

    If the end of an epoch cuts a window short, the update uses the batches in it, divided by their samples or counts.
    Without this callback, windows span epochs. For example, two epochs of seven batches, in windows of four, give
    updates of 4 + 3 + 4 + 3 batches with it; without it 4 + 4 + 4, and two batches remain.

    In data parallel mode ranks may then have different numbers of batches: a rank without remaining batches takes part
    in the others' updates with a count of zero. Without this callback, different numbers are refused before training,
    because the ranks would wait for each other for ever.

    Args:
        each_epoch (bool, optional): Flush at the end of each epoch, or only when training ends. Default: ``True`` .

    Raises:
        TypeError: If `each_epoch` is not a bool.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from gaccum_ms import FlushAccumulation, GradAccumulationCell
        >>> net = nn.Dense(3, 1)
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
        >>> cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), accumulation_steps=4)
        >>> model = ms.Model(cell, optimizer=optimizer)
        >>> x, y = np.ones((14, 3), np.float32), np.zeros((14, 1), np.float32)
        >>> data_set = ms.dataset.NumpySlicesDataset((x, y), shuffle=False).batch(2)
        >>> model.train(2, data_set, callbacks=[FlushAccumulation()])
        >>> print(model.train_network.update_count.asnumpy())
        4
    """

    def __init__(self, each_epoch: bool = True) -> None:
        super().__init__()
        check_bool("FlushAccumulation", "each_epoch", each_epoch)
        self.each_epoch = each_epoch

    def on_train_begin(self, run_context: RunContext) -> None:
        self._epochs = 0

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        self._epochs += 1
        self._before = run_context.original_args().cur_step_num  # batches of the epochs before this one

    # The flush is at the last batch, not after the epoch: evaluation in Model.fit and checkpoints come in between, and
    # must see the update. The epoch's end serves epochs that were stopped early.

    def on_train_step_end(self, run_context: RunContext) -> None:
        parameters = run_context.original_args()
        batches = parameters.get("skipped_batches", 0) + parameters.cur_step_num
        if parameters.batch_num > 0 and batches % parameters.batch_num == 0:
            self._end_epoch(run_context)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        self._end_epoch(run_context)

    def on_train_end(self, run_context: RunContext) -> None:
        self._end_epoch(run_context)  # EarlyStopping and others request the stop after our on_train_epoch_end

    def _end_epoch(self, run_context: RunContext) -> None:
        parameters, step = run_context.original_args(), training_step(run_context)
        last = self._epochs == parameters.epoch_num or run_context.get_stop_requested()
        if step is None or not step.spans_batches or not (self.each_epoch or last):
            return
        if parameters.get("flushed_epoch") == parameters.cur_epoch_num:
            return  # already done, at the epoch's last batch or by another FlushAccumulation
        parameters.flushed_epoch = parameters.cur_epoch_num
        for _ in range(self._flushes(step, parameters)):
            step.flush()

    def _flushes(self, step: TrainOneStepWithGradAccumulationCell, parameters: Any) -> int:
        """The number of updates in which this rank must still take part."""
        ranks = parameters.get("rank_batches") or []
        if all(rank == ranks[0] for rank in ranks):
            return int(step.window_position.asnumpy() > 0)
        first_epoch, steps = self._epochs == 1, int(step.accumulation_steps.asnumpy())
        windows = [rank.windows(steps, first_epoch) for rank in ranks]
        # This rank may have seen fewer batches than planned, if the epoch was stopped.
        own = ranks[get_rank()]
        batches = parameters.cur_step_num - self._before + (own.skipped if first_epoch else 0)
        seen = own._replace(batches=batches)
        return max(ended + (left > 0) for ended, left in windows) - seen.windows(steps, first_epoch)[0]
