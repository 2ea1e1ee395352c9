"""Checkpoint callbacks and an optimizer whose state is sharded: all ranks put it together at the same time."""

from __future__ import annotations

from collections.abc import Sequence

from mindspore import nn
from mindspore.train import Callback, ModelCheckpoint, RunContext

from gaccum_ms.distributed.layout import gather_json
from gaccum_ms.distributed.sharded_optimizer import ShardedOptimizer


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
