"""The record, in a checkpoint, of the run that saved it; it decides whether the run can be resumed here.

An open window holds the sums of one rank, in units of one rule. On another rank, or under another rule, they would
silently be counted twice or wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

from gaccum_ms.backend.data_sets import EpochOfRank
from gaccum_ms.backend.parameters import counter, of_this_rank, overwrite, overwrite_changed, own
from gaccum_ms.distributed.layout import rank_and_ranks

SAME_ON_ALL_RANKS, OTHER_ON_OTHER_RANKS = 1, 2  # the order of a data set's samples; 0: not known
# Checkpoints of earlier versions lack these.
OF_DATA_SET = {own(name) for name in ("epoch_samples", "batch_samples", "sample_order")}
RULES = ("samples", "counts", "sums", "batches")  # how micro-batches are weighted; "batches": equally


def rule_of(options: Any) -> str:
    """How a step with these `Options` weights its micro-batches."""
    return "counts" if options.counts_items else "samples" if options.loss_is_mean else "sums"


def numbers_of(epoch: EpochOfRank) -> dict[str, int]:
    """What the record has of a data set, by name."""
    return {
        "epoch_batches": epoch.batches,
        "epoch_samples": epoch.samples,
        "batch_samples": epoch.batch_samples,
        "sample_order": OTHER_ON_OTHER_RANKS if epoch.order else SAME_ON_ALL_RANKS,
    }


class RunRecord(nn.Cell):
    """The record of the run that saves a checkpoint. No graph reads its Parameters; they are in every checkpoint.
    `rules` : the possible weightings of micro-batches, out of `RULES` ; if several, each window's first batch decides,
    in `window_rule` . `reduction` : what the losses are, None if it is not yet known; `resumes_windows` : whether this
    rank can go on with its own open window."""

    def __init__(
        self,
        owner: str,
        rules: Sequence[str],
        accumulation_steps: int,
        reduction: str | None,
        resumes_windows: bool = True,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.owner = owner
        self.rules = tuple(rules)
        self.reduction = reduction
        self.rank, self.ranks = rank_and_ranks()
        self.own_steps = accumulation_steps
        self.resumes_windows = resumes_windows
        self.loss_check: Any = None  # what was proved of the loss, as text
        self.begun = False  # whether the step has run
        self.loaded = False  # whether a checkpoint may have been loaded since its last run
        self.training_ended = False  # whether an `ms.Model.train` has ended since the last batch
        self.window_origin = of_this_rank(own("window_origin"), ms.Tensor([self.rank, self.ranks], ms.int32))
        self.window_rule = counter("window_rule", RULES.index(self.rules[0]))
        self.configured_steps = counter("configured_steps", accumulation_steps)
        # Of the data set of the last ms.Model.train or resume; 0: not known.
        self.epoch_batches = counter("epoch_batches")
        self.epoch_samples = of_this_rank(own("epoch_samples"), ms.Tensor(0, ms.int64))
        self.batch_samples = counter("batch_samples")
        self.sample_order = counter("sample_order")
        self.seen_samples = 0  # in the largest batch, where no data set is known
        self.random_state = of_this_rank(own("random_state"), ms.get_rng_state())

    def extend_repr(self) -> str:
        checked = "" if self.loss_check is None else f", the loss against the options: {self.loss_check}"
        return f"reduction={self.reduction!r}, weighs by {' or '.join(self.rules)}{checked}"

    def note_data_set(self, epoch: EpochOfRank) -> None:
        """Note the data set that is trained on."""
        for name, value in numbers_of(epoch).items():
            parameter = getattr(self, name)
            overwrite_changed(parameter, ms.Tensor(value, parameter.dtype))

    def note_batch(self, samples: int) -> None:
        """Note a batch, which may come from no data set that is known here."""
        self.seen_samples = max(self.seen_samples, samples)

    def keep_state(self) -> None:
        """Keep for the next checkpoint what is not in Parameters: the default generator's state, and the samples of a
        batch."""
        overwrite_changed(self.random_state, ms.get_rng_state())
        if self.seen_samples and not int(self.batch_samples.asnumpy()):
            overwrite(self.batch_samples, ms.Tensor(self.seen_samples, ms.int32))

    def note_load(self) -> None:
        """Note that an open window's Parameters were written."""
        self.loaded = True

    def begin(self, window: Any, batches: int) -> None:
        """Refuse a window that cannot be continued. Called before the first step, and before the first one after
        MindSpore loaded a checkpoint."""
        steps = int(self.configured_steps.asnumpy())
        rank, ranks = self.window_origin.asnumpy().tolist()
        self.check(window is not None, batches, rank, ranks, int(self.window_rule.asnumpy()), steps)
        self._settle(window)
        self.begun = True
        self.loaded = False

    def load(self, cell: nn.Cell, values: Mapping[str, np.ndarray], window: Any) -> None:
        """Load a checkpoint's values into `cell` , by name; `resume` has checked them. If a checkpoint of another kind
        of training lacks window and counts, they start from zero."""
        values = {own("batch_count"): np.array(0), own("update_count"): np.array(0), **values}
        self.seen_samples = 0
        if window is not None:
            window.reset_eagerly()
            values = window.accumulators.adapt(values)
        for parameter in cell.get_parameters():
            if parameter.name in values:
                overwrite(parameter, ms.Tensor(values[parameter.name], parameter.dtype))
        if own("random_state") in values:
            ms.set_rng_state(ms.Tensor(values[own("random_state")], ms.uint8))
        self._settle(window)

    def check(self, spans_batches: bool, batches: int, rank: int, ranks: int, rule: int, steps: int) -> None:
        """Refuse a window that cannot be finished here. All but `spans_batches` is of the checkpoint; `rule` is an
        index of `RULES` ."""
        if not batches:
            return
        if not self.resumes_windows:
            raise ValueError(
                f"For '{self.owner}', in semi-auto and auto parallel mode a checkpoint must be from between two "
                f"windows, because each device has its own part of the sums, but got one that was saved {batches} "
                f"batch(es) after a window's beginning. Load an earlier one. FlushAccumulation() leaves no window open "
                f"at a training's end."
            )
        if not spans_batches:
            raise ValueError(
                f"For '{self.owner}', the checkpoint was saved in a window, {batches} batch(es) after its beginning, "
                f"which a step of single batches cannot finish, but got a checkpoint with accumulation_steps={steps} "
                f"and a cell with accumulation_steps={self.own_steps}. Load it by gaccum_ms.resume, or give the cell "
                f"accumulation_steps > 1."
            )
        if rule >= len(RULES):
            raise ValueError(
                f"For '{self.owner}', a checkpoint that was saved in a window, here {batches} batch(es) after its "
                f"beginning, must have the whole sums, but got one of an earlier version with sharded accumulators. "
                f"Load a checkpoint between two windows."
            )
        if (rank, ranks) != (self.rank, self.ranks):
            raise ValueError(
                f"For '{self.owner}', the checkpoint was saved in a window, whose sums are "
                f"those of one rank, but got the sums of rank {rank} of {ranks} on rank {self.rank} of "
                f"{self.ranks}: they would be lost or counted twice. Give gaccum_ms.resume the checkpoints of all "
                f"{ranks} rank(s)."
            )
        if RULES[rule] not in self.rules:
            raise ValueError(
                f"For '{self.owner}', a window must be finished by the rule that it began with, but got a checkpoint "
                f"whose micro-batches weigh by {RULES[rule]}, where here they weigh by {' or '.join(self.rules)}. Give "
                f"'count' and 'reduction' as they were, or load a checkpoint between two windows."
            )

    def _settle(self, window: Any) -> None:
        """Record this run as the origin. If the saving cell had other `accumulation_steps` , later windows get this
        run's."""
        if window is not None:
            overwrite_changed(window.updates_held, ms.Tensor(0, ms.int32))
            if int(self.configured_steps.asnumpy()) != self.own_steps:
                window.set_steps(self.own_steps)
        overwrite_changed(self.window_origin, ms.Tensor([self.rank, self.ranks], ms.int32))
        if len(self.rules) == 1:
            overwrite_changed(self.window_rule, ms.Tensor(RULES.index(self.rules[0]), ms.int32))
        overwrite_changed(self.configured_steps, ms.Tensor(self.own_steps, ms.int32))
