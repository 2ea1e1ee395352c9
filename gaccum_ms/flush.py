"""What becomes of a window that is open when an epoch or the training ends, and how ranks agree on it.

By default a window goes on into the next epoch, so that every update has the same number of batches.
`FlushAccumulation` ends it with the epoch: the tail updates with what it has.

Each update reduces over ranks, so all must make equally many. Ranks whose shards differ in their number of batches do
not: before training they tell each other how many they have, and the shorter ones make up for it at the epoch's end,
with what they have left and then with counts of zero.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import mindspore as ms
from mindspore import ops
from mindspore.communication import get_rank
from mindspore.train import Callback, RunContext

from gaccum_ms.accumulator import overwrite
from gaccum_ms.train_step import TrainOneStepWithGradAccumulationCell


def training_step(run_context: RunContext) -> TrainOneStepWithGradAccumulationCell | None:
    """Our step in what `ms.Model` trains; data sinking wraps it."""
    network = run_context.original_args().train_network
    steps = (cell for _, cell in network.cells_and_names() if isinstance(cell, TrainOneStepWithGradAccumulationCell))
    return next(steps, None)


class FlushAccumulation(Callback):
    r"""
    Update with the batches that are left over when an epoch ends, in place of keeping the window open.

    A window of `accumulation_steps` batches that the end of an epoch cuts short updates with what it has, divided by
    the samples or counts that are really in it. Without this callback windows span epochs: seven batches in windows of
    four over two epochs are, with it, the updates 4 + 3 + 4 + 3; without it 4 + 4 + 4 and two batches left.

    In data parallel mode ranks may then have different numbers of batches: a rank that has none left takes part in the
    others' updates with a count of zero. Without this callback that is refused before training, because the ranks
    would wait for each other for ever.

    Args:
        each_epoch (bool, optional): Whether to flush at the end of each epoch, or only when training ends.
            Default: ``True`` .

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
        if not isinstance(each_epoch, bool):
            raise TypeError(
                f"For 'FlushAccumulation', the argument 'each_epoch' must be a bool, but got {each_epoch!r}."
            )
        self.each_epoch = each_epoch
        self._epochs = 0
        self._before = 0  # batches of the epochs before this one
        self._flushed = True

    def on_train_begin(self, run_context: RunContext) -> None:
        self._epochs = 0

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        self._epochs += 1
        self._before = run_context.original_args().cur_step_num
        self._flushed = False

    # At the last batch, not after the epoch: what comes then, evaluation in Model.fit and checkpoints, must see the
    # update. The epoch's end is for epochs that something stopped before.

    def on_train_step_end(self, run_context: RunContext) -> None:
        parameters = run_context.original_args()
        if parameters.batch_num > 0 and (_skipped(parameters) + parameters.cur_step_num) % parameters.batch_num == 0:
            self._end_epoch(run_context)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        self._end_epoch(run_context)

    def on_train_end(self, run_context: RunContext) -> None:
        self._end_epoch(run_context)  # EarlyStopping and others ask for the stop after our on_train_epoch_end

    def _end_epoch(self, run_context: RunContext) -> None:
        step = training_step(run_context)
        last = self._epochs == run_context.original_args().epoch_num or run_context.get_stop_requested()
        if self._flushed or step is None or not step.spans_batches or not (self.each_epoch or last):
            return
        self._flushed = True
        for _ in range(self._flushes(step, run_context.original_args())):
            step.flush()

    def _flushes(self, step: TrainOneStepWithGradAccumulationCell, parameters: Any) -> int:
        """How many updates this rank still has to take part in."""
        shards = parameters.get("shards") or []
        if all(shard == shards[0] for shard in shards):
            return int(step.window_position.asnumpy() > 0)
        first_epoch, steps = self._epochs == 1, int(step.accumulation_steps.asnumpy())
        windows = [shard.windows(steps, first_epoch) for shard in shards]
        # What this rank has really seen may be less than planned: something may have stopped the epoch.
        own = shards[get_rank()]
        batches = parameters.cur_step_num - self._before + (own.skipped if first_epoch else 0)
        seen = own._replace(batches=batches)
        return max(ended + (left > 0) for ended, left in windows) - seen.windows(steps, first_epoch)[0]


class Shard(NamedTuple):
    """What a rank has to train on."""

    batches: int  # in an epoch
    skipped: int  # of the first epoch, when training resumes in it
    position: int  # batches in the window that is open when training begins
    window_steps: int  # batches that this window is to have

    def windows(self, steps: int, first_epoch: bool) -> tuple[int, int]:
        """Windows of `steps` batches that end within the epoch, and batches left after the last of them."""
        if not first_epoch:
            return divmod(self.batches, steps)
        batches = self.batches - self.skipped
        if not self.position:
            return divmod(batches, steps)
        missing = max(self.window_steps - self.position, 1)  # it ends with the next batch, if not before
        if batches < missing:
            return 0, self.position + batches
        ended, left = divmod(batches - missing, steps)
        return 1 + ended, left


class WindowWatch(Callback):
    """What every training with our step needs, whether or not the user gives it callbacks: model.py adds it."""

    def on_train_begin(self, run_context: RunContext) -> None:
        """Refuse ranks with different numbers of batches, unless something is going to even them out."""
        parameters, step = run_context.original_args(), training_step(run_context)
        if step is None:
            return
        overwrite(step.provenance.epoch_batches, ms.Tensor(parameters.batch_num, ms.int32))
        if not step.reducer_flag:
            return
        window_steps = int(step.window_steps.asnumpy()) if step.spans_batches else 1
        own = Shard(parameters.batch_num, _skipped(parameters), int(step.window_position.asnumpy()), window_steps)
        gathered = ops.AllGather()(ms.Tensor([own], ms.int32)).asnumpy()
        parameters.shards = shards = [Shard(*map(int, row)) for row in gathered]
        if all(shard == own for shard in shards):
            return
        flushes = [one for one in parameters.list_callback if isinstance(one, FlushAccumulation) and one.each_epoch]
        if step.spans_batches and flushes:
            return
        shown = [
            f"{one.batches - one.skipped} on rank {rank}"
            + (f" (and {one.position} in its window)" * bool(one.position))
            for rank, one in enumerate(shards)
        ]
        raise ValueError(
            f"For 'GradAccumulationCell', all ranks must have the same number of batches in an epoch, because each "
            f"update reduces over all of them, but got {', '.join(shown)}. Nothing was trained. Give all ranks equally "
            f"many, as 'num_shards' of a dataset does; or, with 'accumulation_steps' larger than 1, give model.train "
            f"the callback FlushAccumulation()."
        )

    def on_train_step_end(self, run_context: RunContext) -> None:
        step = training_step(run_context)
        if step is not None and run_context.original_args().dataset_sink_mode:
            step.provenance.keep_random_state()  # no hook of the step's own runs when its wrapper is saved

    def on_train_end(self, run_context: RunContext) -> None:
        run_context.original_args().train_dataset.set_init_step(0)  # resume's: another training begins at the beginning
        step = training_step(run_context)
        if step is None or not step.spans_batches or not int(step.window_position.asnumpy()):
            return
        if any(isinstance(one, FlushAccumulation) for one in run_context.original_args().list_callback):
            return  # its own on_train_end comes after this one
        batches, steps = int(step.window_position.asnumpy()), int(step.window_steps.asnumpy())
        warnings.warn(
            f"For 'GradAccumulationCell', training ended in the middle of a window: {batches} batch(es) of {steps} "
            f"are added up, and no update has used them. To use them give model.train the callback "
            f"FlushAccumulation(), or call flush() of the training step; batches of another model.train go on with "
            f"the window.",
            UserWarning,
            stacklevel=2,
        )


def _skipped(parameters: Any) -> int:
    """Batches of the first epoch that a resumed training does not see again."""
    return parameters.train_dataset.get_init_step() % max(parameters.batch_num, 1)
