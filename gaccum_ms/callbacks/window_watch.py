"""A callback for every training with our step: model_hook.py adds it to `ms.Model.train` .

Each update reduces over ranks, so all ranks must make the same number of updates. Before training, the ranks compare
their numbers of batches. If they differ and no callback evens them out, all ranks raise an error; otherwise they would
wait for each other for ever. So do ranks that would save to the same checkpoint files. At the end, it warns if a window
is still open.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mindspore.train import Callback, RunContext

from gaccum_ms.backend.data_sets import epoch_of
from gaccum_ms.backend.user_warnings import warn_user
from gaccum_ms.callbacks.flush import FlushAccumulation
from gaccum_ms.callbacks.rate_length import warn_of_rates_for_batches
from gaccum_ms.checkpoint.data_position import begin_anew
from gaccum_ms.checkpoint.rank_folders import refuse_shared_folders
from gaccum_ms.distributed.layout import gather_json
from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell


class RankBatches(NamedTuple):
    """The batches of a rank."""

    batches: int  # in an epoch
    skipped: int  # in the first epoch, when training resumes within it
    position: int  # batches in the window that is open when training begins
    window_steps: int  # batches of this window when it is complete

    def windows(self, steps: int, first_epoch: bool) -> tuple[int, int]:
        """Windows of `steps` batches that end within the epoch, and batches left after the last of them."""
        batches = self.batches - self.skipped if first_epoch else self.batches
        if not first_epoch or not self.position:
            return divmod(batches, steps)
        missing = max(self.window_steps - self.position, 1)  # a full window ends with the next batch
        if batches < missing:
            return 0, self.position + batches
        ended, left = divmod(batches - missing, steps)
        return 1 + ended, left


class WindowWatch(Callback):
    """Checks before, during and after every training with our step."""

    def __init__(self, step: TrainOneStepWithGradAccumulationCell) -> None:
        super().__init__()
        self._step = step
        self._begun = False

    def on_train_begin(self, run_context: RunContext) -> None:
        parameters = run_context.original_args()
        # Read now: an evaluation on the same data set, in Model.fit, resets it.
        parameters.skipped_batches = parameters.train_dataset.get_init_step() % max(parameters.batch_num, 1)
        record = self._step.run_record
        record.note_data_set(epoch_of(parameters.train_dataset, record.ranks, parameters.batch_num))
        self._step.keep_records()

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Before the first epoch: other callbacks may have let windows span batches when the training began."""
        if not self._begun:
            self._begun = True
            self._check(run_context.original_args())

    def _check(self, parameters: Any) -> None:
        """Refuse ranks with different numbers of batches, unless a callback evens them out."""
        step = self._step
        batches = parameters.epoch_num * parameters.batch_num - parameters.skipped_batches
        flushed = any(flush.each_epoch for flush in _flushes(parameters))
        warn_of_rates_for_batches(step, batches, flushes=flushed * parameters.epoch_num)
        if not step.reducer_flag:
            return
        refuse_shared_folders(parameters.list_callback)
        window_steps = int(step.window_steps.asnumpy()) if step.spans_batches else 1
        own = RankBatches(
            parameters.batch_num, parameters.skipped_batches, int(step.window_position.asnumpy()), window_steps
        )
        parameters.rank_batches = batches_of = [RankBatches(*row) for row in gather_json(own)]
        if all(other == own for other in batches_of) or (step.spans_batches and flushed):
            return
        ranks_as_text = [
            f"{of_rank.batches - of_rank.skipped} on rank {rank}"
            + (f" (and {of_rank.position} in its window)" * bool(of_rank.position))
            for rank, of_rank in enumerate(batches_of)
        ]
        raise ValueError(
            f"For 'GradAccumulationCell', all ranks must have the same number of batches in an epoch, because each "
            f"update reduces over all of them, but got {', '.join(ranks_as_text)}. Nothing was trained. Give all ranks "
            f"equally many, as 'num_shards' of a dataset does; or, with 'accumulation_steps' larger than 1, give "
            f"model.train the callback FlushAccumulation()."
        )

    def on_train_step_end(self, run_context: RunContext) -> None:
        if run_context.original_args().dataset_sink_mode:
            self._step.run_record.keep_state()  # saving the wrapper runs no hook of the step

    def on_train_end(self, run_context: RunContext) -> None:
        step = self._step
        step.run_record.training_ended = True
        begin_anew(run_context.original_args().train_dataset)  # if resume has set a position
        if not step.spans_batches or not int(step.window_position.asnumpy()):
            return
        if _flushes(run_context.original_args()):  # which will end the window in its on_train_end
            return
        batches, steps = int(step.window_position.asnumpy()), int(step.window_steps.asnumpy())
        warn_user(
            f"For 'GradAccumulationCell', training ended in the middle of a window: {batches} batch(es) of {steps} "
            f"are added up, and no update has used them. To use them give model.train the callback "
            f"FlushAccumulation(), or call flush() of the training step; batches of another model.train go on with "
            f"the window."
        )


def _flushes(parameters: Any) -> list[FlushAccumulation]:
    return [callback for callback in parameters.list_callback if isinstance(callback, FlushAccumulation)]
