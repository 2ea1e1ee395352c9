"""Counts of a checkpoint in the batches of the present ranks.

A checkpoint counts the batches of the ranks that saved it. Other ranks, or other batches, make the same updates in two
forms, or in both together: each rank's batch has more samples, or its window has more batches.

    8 samples an update    batch(8 // ranks)    accumulation_steps=4 // ranks with batch(2)
    two ranks                4 a batch            2 batches of 2
    one rank                 8 a batch            4 batches of 2

So all is compared in samples of all ranks. Where the samples of a batch are not known, batches count alike.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np

from gaccum_ms.accumulation import accumulators
from gaccum_ms.accumulation.open_window import BATCHES, COUNT, LOSS
from gaccum_ms.backend.data_sets import EpochOfRank, epoch_of, samples_of_first_batch
from gaccum_ms.backend.parameters import own
from gaccum_ms.backend.user_warnings import warn_user
from gaccum_ms.checkpoint.rank_files import Values, origin
from gaccum_ms.record.run_record import OTHER_ON_OTHER_RANKS, RULES, RunRecord, numbers_of

_STEPS = ("window_position", "window_steps", "accumulation_steps", "rate_steps", "configured_steps")


class Run(NamedTuple):
    """What a run's ranks take. A number is 0 if it is not known."""

    ranks: int
    steps: int  # batches of each rank in an update
    batch: int  # samples in a batch of each rank
    epoch_batches: int  # of each rank
    epoch: int  # samples of all ranks
    unit: str = "samples"

    @property
    def all_batches(self) -> int:
        """Samples in a batch of all ranks."""
        return self.ranks * self.batch

    @property
    def update(self) -> int:
        return self.all_batches * self.steps

    def __str__(self) -> str:
        batches = f"{self.steps} batch(es)" + f" of {self.batch}" * (self.unit == "samples")
        return f"{self.update} {self.unit}, {batches} on each of {self.ranks} rank(s)"


def counted_here(files: list[tuple[Path, Values]], values: Values, record: RunRecord, data_set: Any) -> Values:
    """The values with which a rank resumes, in its own batches. Refuses what does not divide, and warns if the next
    updates are others than those of the run that saved. The next checkpoint is of this run."""
    if own("batch_count") not in values:  # of a training without accumulation
        return values
    saved = _saved(files, values)
    if data_set is None:
        same_updates = saved.ranks * saved.steps == record.ranks * record.own_steps
        ratio = Fraction(saved.ranks, record.ranks) if same_updates else Fraction(1)
        return _without_data_set(_with_steps(values, ratio, ""), saved, record.ranks)
    epoch = epoch_of(data_set, record.ranks)
    batches, samples, batch, _ = epoch
    here = Run(record.ranks, record.own_steps, batch, batches, record.ranks * samples)
    saved, here = _in_one_unit(saved, here, data_set)
    _check_epoch(saved, here)
    position = _position(files, values, saved, here)
    ratio = Fraction(saved.all_batches, here.all_batches) if saved.update == here.update else Fraction(1)
    here_values = _reweighed(values, Fraction(saved.batch, here.batch))
    here_values = _with_steps(here_values, ratio, f": an update had {saved}, and has {here}")
    _warn_of_other_updates(values, record, saved, here, epoch)
    new = numbers_of(epoch) | {"batch_count": position}
    return here_values | {own(name): np.array(value, np.int64) for name, value in new.items()}


def _saved(files: list[tuple[Path, Values]], values: Values) -> Run:
    ranks = origin(files[0][1])[1]
    names = ("configured_steps", "batch_samples", "epoch_batches", "epoch_samples")
    steps, batch, batches, samples = (int(values.get(own(name), 0)) for name in names)
    return Run(ranks, steps, batch, batches, ranks * samples)


def _without_data_set(values: Values, saved: Run, ranks: int) -> Values:
    """The values with the batches that each of so many ranks has seen, if batches have the samples that they had, and
    those of an epoch (0, for unknown, if they do not divide)."""
    new = {"batch_count": int(values[own("batch_count")]) * saved.ranks // ranks}
    for name in ("epoch_batches", "epoch_samples"):
        number = int(values.get(own(name), 0)) * saved.ranks
        new[name] = 0 if number % ranks else number // ranks
    return values | {own(name): np.array(value, np.int64) for name, value in new.items()}


def _in_one_unit(saved: Run, here: Run, data_set: Any) -> tuple[Run, Run]:
    """Both in samples; in batches, if the samples of one's batches are not known."""
    if saved.epoch_batches and not saved.epoch:  # `batch` is the largest that the step had, and others may differ
        saved, here = _by_whole_batches(saved, here, data_set)
    elif not saved.epoch_batches and saved.ranks == here.ranks:  # a loop, which may make several of a data set's
        saved = saved._replace(batch=here.batch)
    if not (saved.batch and here.batch):
        saved, here = (
            run._replace(batch=1, epoch=run.ranks * run.epoch_batches, unit="batches") for run in (saved, here)
        )
    if not saved.epoch_batches:  # a loop of the user's, which had this data set
        saved = saved._replace(epoch_batches=-(-here.epoch // saved.all_batches), epoch=here.epoch)
    return saved, here


def _by_whole_batches(saved: Run, here: Run, data_set: Any) -> tuple[Run, Run]:
    """Both with their samples, if these alone explain the number of batches: all ranks' batches have as many."""
    as_many_batches = saved.ranks * saved.epoch_batches == here.ranks * here.epoch_batches
    batch = 0 if as_many_batches else here.batch or samples_of_first_batch(data_set)
    if here.ranks * batch != saved.all_batches:
        batch = 0
    return (
        saved._replace(epoch=saved.epoch_batches * saved.all_batches),
        here._replace(batch=batch, epoch=here.epoch_batches * here.ranks * batch),
    )


def _check_epoch(saved: Run, here: Run) -> None:
    if saved.epoch != here.epoch:
        raise ValueError(
            f"For 'resume', the batches of an epoch must have the samples that they had, but got {here.epoch_batches} "
            f"an epoch on each of {here.ranks} rank(s), where the checkpoint has {saved.epoch_batches} on each of "
            f"{saved.ranks}: {here.epoch} {here.unit} of all ranks, and {saved.epoch}."
        )


def _position(files: list[tuple[Path, Values]], values: Values, saved: Run, here: Run) -> int:
    """The batches of each rank, over all epochs, after which training goes on."""
    counts = sorted({int(other.get(own("batch_count"), 0)) for _, other in files})
    epochs, batches = divmod(int(values[own("batch_count")]), saved.epoch_batches)
    seen = batches * saved.all_batches
    if (len(counts) > 1 and saved.ranks != here.ranks) or seen % here.all_batches:
        raise ValueError(
            f"For 'resume', the batches that were seen must divide by the number of ranks, but got {counts} on each of "
            f"{saved.ranks} rank(s), and now {here.ranks}: {seen} {here.unit} of an epoch that has not ended, and "
            f"{here.all_batches} in a batch of all ranks. Resume on a number that divides them, or without 'data_set', "
            f"which then begins anew."
        )
    return epochs * here.epoch_batches + seen // here.all_batches


def _with_steps(values: Values, ratio: Fraction, numbers: str) -> Values:
    """The values with `ratio` times the batches of a window. Those of the open window must divide, and those of the
    next one."""
    if ratio == 1:
        return values
    is_open = int(values.get(own("window_position"), 0)) > 0
    new = {}
    for name in _STEPS:
        if own(name) not in values:
            continue
        batches = int(values[own(name)]) * ratio
        if batches.denominator > 1 and name == "window_steps" and not is_open:
            batches = Fraction(0)  # the next window begins with `accumulation_steps`
        if batches.denominator > 1:
            raise ValueError(
                f"For 'resume', a window's batches must divide among the ranks, but got '{name}' of "
                f"{int(values[own(name)])}, of which this run would have {float(batches):g}{numbers}. Save between two "
                f"windows, as UpdateCheckpoint does, or resume on another number of ranks."
            )
        new[own(name)] = np.array(int(batches), np.int32)
    if own("window_sums") in values and is_open:
        sums = np.array(values[own("window_sums")])
        sums[BATCHES] = new[own("window_position")]
        new[own("window_sums")] = sums
    return values | new


def _reweighed(values: Values, ratio: Fraction) -> Values:
    """The values of a window whose batches weigh alike, if a batch then had `ratio` times the samples of one now."""
    is_open = int(values.get(own("window_position"), 0)) > 0
    if ratio == 1 or not is_open or RULES[int(values.get(own("window_rule"), 0))] != "batches":
        return values
    kept = (accumulators.PREFIX, accumulators.COMPENSATION_PREFIX)
    new = {name: value * float(ratio) for name, value in values.items() if name.startswith(kept)}
    new[own("window_sums")] = np.array(values[own("window_sums")])
    new[own("window_sums")][[LOSS, COUNT]] *= float(ratio)
    return values | {name: value.astype(values[name].dtype) for name, value in new.items()}


def _warn_of_other_updates(values: Values, record: RunRecord, saved: Run, here: Run, epoch: EpochOfRank) -> None:
    """One warning says all in which the updates differ, if there are other ranks or batches."""
    if (saved.ranks, saved.batch) == (here.ranks, here.batch):
        return
    differences = []
    if not int(values.get(own("batch_samples"), 0)) and not int(values.get(own("epoch_batches"), 0)):
        differences.append("the checkpoint does not say how large a batch was, which is taken to be as large as now")
    if saved.update != here.update:
        differences.append(f"an update has {here}, where it had {saved}")
    elif saved.all_batches != here.all_batches and any(here.epoch % run.all_batches for run in (saved, here)):
        differences.append(
            f"an epoch's {here.epoch} {here.unit} are no whole batches, so that windows end at other ones, unless "
            f"FlushAccumulation() ends them with the epoch"
        )
    if saved.ranks != here.ranks:
        if epoch.order:
            differences.append(epoch.order)
        elif int(values.get(own("sample_order"), 0)) == OTHER_ON_OTHER_RANKS:
            differences.append("the data set of the run that saved had another order of samples")
        factor = _factor_of_ranks(int(values.get(own("window_rule"), 0)), saved, here)
        if factor != 1:
            differences.append(
                f"gradients_mean={ms.get_auto_parallel_context('gradients_mean')} makes their gradients "
                f"{float(factor):.6g} times as large"
            )
    if differences:
        warn_user(
            f"For 'resume', the next updates are not those of the run that saved, on {saved.ranks} rank(s): "
            f"{'; '.join(differences)}."
        )


def _factor_of_ranks(rule: int, saved: Run, here: Run) -> Fraction:
    """By which factor a gradient changes with the number of ranks, as in MindSpore's own step: that of a mean, if
    ranks are summed, and that of a sum, if they are averaged."""
    if ms.get_auto_parallel_context("parallel_mode") != ms.ParallelMode.DATA_PARALLEL:
        return Fraction(1)  # a single process need not have the other ranks' gradients_mean
    # Earlier versions had rules of sharded accumulators after these, in the same order.
    averages, weighs_by = ms.get_auto_parallel_context("gradients_mean"), RULES[rule % len(RULES)]
    if weighs_by in ("samples", "batches") and not averages:
        return Fraction(here.ranks, saved.ranks)
    if weighs_by == "sums" and averages:
        return Fraction(saved.ranks, here.ranks)
    return Fraction(1)
