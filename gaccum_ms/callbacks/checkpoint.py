"""Checkpoints by update: MindSpore's `ModelCheckpoint` counts batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import nn
from mindspore.train import Callback, ModelCheckpoint, RunContext

from gaccum_ms.callbacks.window_watch import training_step
from gaccum_ms.checks.arguments import check_positive_int
from gaccum_ms.distributed.layout import gather_json
from gaccum_ms.distributed.sharded_optimizer import ShardedOptimizer
from gaccum_ms.record.window_callback import WindowCallback
from gaccum_ms.record.window_record import WindowRecord


class UpdateCheckpoint(WindowCallback, ModelCheckpoint):
    r"""
    Save a checkpoint after every `updates` updates, at a window's end, and when training ends.

    Otherwise it is a `mindspore.train.ModelCheckpoint <https://www.mindspore.cn/docs/en/master/api_python/train/
    mindspore.train.ModelCheckpoint.html>`_ , called only at these times. `ModelCheckpoint` itself counts batches, and
    also saves in the middle of a window. :func:`resume` accepts the checkpoints of both.

    Args:
        updates (int): Updates between two checkpoints.
        **kwargs (Any): `prefix` , `directory` and `config` of `ModelCheckpoint` . `config` counts batches and seconds:
            its `save_checkpoint_steps` must stay 1.

    Raises:
        TypeError: If `updates` is not an int.
        ValueError: If `updates` is less than 1, or `config` has another `save_checkpoint_steps` than 1; if training
            begins without our step.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from gaccum_ms import GradAccumulationCell, UpdateCheckpoint
        >>> net = nn.Dense(3, 1)
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
        >>> cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), accumulation_steps=3)
        >>> x, y = np.ones((18, 3), np.float32), np.zeros((18, 1), np.float32)
        >>> data_set = ms.dataset.NumpySlicesDataset((x, y), shuffle=False).batch(2)
        >>> folder = tempfile.mkdtemp()
        >>> ms.Model(cell, optimizer=optimizer).train(
        ...     1, data_set, callbacks=[UpdateCheckpoint(1, prefix="net", directory=folder)]
        ... )
        >>> print(sorted(file.name for file in Path(folder).glob("*.ckpt")))
        ['net-1_3.ckpt', 'net-1_6.ckpt', 'net-1_9.ckpt']
    """

    def __init__(self, updates: int = 1, **kwargs: Any) -> None:
        check_positive_int("UpdateCheckpoint", "updates", updates)
        super().__init__(**kwargs)
        if self._config.save_checkpoint_steps != 1:
            raise ValueError(
                f"For 'UpdateCheckpoint', 'save_checkpoint_steps' of 'config' must be 1, because updates are counted, "
                f"but got {self._config.save_checkpoint_steps}. Give the number of updates as 'updates'."
            )
        self.updates = updates

    def begin(self, run_context: RunContext) -> None:
        step: Any = training_step(run_context)
        self._saved_update = self._last_update = int(step.update_count.asnumpy())

    def on_window_end(self, run_context: RunContext, record: WindowRecord) -> None:
        self._last_update = record.update

    def step_end(self, run_context: RunContext) -> None:
        # Not at the window's end: other callbacks may then still change the rate, which the checkpoint holds.
        if self._last_update >= self._saved_update + self.updates:
            self._saved_update = self._last_update
            super().step_end(run_context)


class _Saves(Callback):
    """Runs before and after a checkpoint callback, so that all ranks gather the whole state at the same time."""

    def __init__(self, optimizer: ShardedOptimizer, begins: bool) -> None:
        super().__init__()
        self.act = optimizer.begin_saves if begins else optimizer.end_saves

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        ranks = run_context.original_args().get("rank_batches") or []
        if any(rank != ranks[0] for rank in ranks):
            raise ValueError(
                f"For 'ShardedOptimizer', all ranks must have the same number of batches where checkpoints are saved, "
                f"because all put the state together at the same batch, but got "
                f"{[rank.batches for rank in ranks]}. Give all ranks equally many, or save after training, within "
                f"'with optimizer.whole_state():'."
            )

    def step_end(self, run_context: RunContext) -> None:
        self.act()

    def end(self, run_context: RunContext) -> None:
        self.act()


def let_checkpoints_save(callbacks: Sequence[Callback], optimizer: nn.Optimizer | None) -> list[Callback]:
    """The callbacks; if the optimizer is sharded, with a `_Saves` before and after each checkpoint. A collective."""
    if not isinstance(optimizer, ShardedOptimizer) or optimizer.ranks == 1:
        return list(callbacks)
    optimizer.end_saves()  # a training that failed may have begun some
    saving = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
    when = [
        [type(callback).__name__, callback._config.save_checkpoint_steps, getattr(callback, "updates", None)]
        for callback in saving
    ]
    all_ranks = gather_json(when)
    if any(those != when for those in all_ranks) or any(not steps for those in all_ranks for _, steps, _ in those):
        raise ValueError(
            f"For 'ShardedOptimizer', all ranks must have the same checkpoints, by steps or updates and not by "
            f"seconds, because all put the state together at the same time, but got {all_ranks} (class, "
            f"'save_checkpoint_steps', updates) of the ranks. Give each rank ModelCheckpoint or UpdateCheckpoint, with "
            f"a directory of its own; or save within 'with optimizer.whole_state():'."
        )
    bracketed = [
        [_Saves(optimizer, True), callback, _Saves(optimizer, False)] if callback in saving else [callback]
        for callback in callbacks
    ]
    return [callback for bracket in bracketed for callback in bracket]
