"""Deliberate faults in copies of the project, one in each, and the tests that must find it:
``python tests/mutations.py [--sample 10] [words]``. There are as many copies at a time as cores.

Each fault replaces one piece of text, and only the named tests run, first the quick ones. A fault that they do not find
is a survivor: a test is missing.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1200  # seconds for the tests of one fault


class Fault(NamedTuple):
    """A description, the place, and the tests that find it: arguments of pytest, without ``tests/`` ."""

    what: str
    file: str
    right: str
    wrong: str
    tests: str


def read(file: Path) -> list[Fault]:
    """The faults of a file: for each, the description, the place, the right lines with a minus before them, the wrong
    ones with a plus, and the tests."""
    faults = []
    for block in file.read_text().strip().split("\n\n"):
        what, place, *change, tests = block.split("\n")
        right, wrong = ("\n".join(line[1:] for line in change if line[0] == sign) for sign in "-+")
        faults.append(Fault(what, place, right, wrong, tests))
    return faults


FAULTS = [
    # -- micro-batches and windows
    Fault(
        "micro-batches are rounded down",
        "splitting/even_split.py",
        "size = max(-(-samples // micro_size), min(least, samples))",
        "size = max(samples // micro_size, 1)",
        "splitting/test_micro_batches.py",
    ),
    Fault(
        "what is left over is forgotten",
        "splitting/even_split.py",
        "return SplitPlan(samples, size, full, rest) if full",
        "return SplitPlan(samples, size, full, 0) if full",
        "splitting/test_micro_batches.py",
    ),
    Fault(
        "the smaller last micro-batch is not run",
        "splitting/micro_batches.py",
        "if rest > 0 else sums",
        "if rest > 99 else sums",
        "end_to_end/test_equivalence.py -k dense-3-13-sgd-graph",
    ),
    Fault(
        "copies of a network that draws keep the flags of an earlier compilation",
        "accumulation/window.py",
        "        self._begin_copies()\n",
        "",
        "backend/test_random_operators.py -k flags",
    ),
    Fault(
        "the sum over samples for their mean",
        "accumulation/ledger.py",
        "return scale / items if self.loss_is_mean else scale",
        "return scale",
        "end_to_end/test_equivalence.py -k dense-3-13-sgd-graph",
    ),
    Fault(
        "micro-batches weigh alike",
        "accumulation/measure.py",
        "seed = unit * items if self.loss_is_mean else unit",
        "seed = unit",
        "end_to_end/test_equivalence.py -k dense-3-13-sgd-graph",
    ),
    Fault(
        "accumulators are not cleared",
        "accumulation/accumulators.py",
        "cleared = self.map(zero, ops.depend(self.sums, after))",
        "cleared = after",
        "end_to_end/test_equivalence.py -k dense-3-13-sgd-graph",
    ),
    Fault(
        "the loss is reported with its scale",
        "accumulation/ledger.py",
        "        loss = sums / scale\n",
        "        loss = sums\n",
        "accumulation/test_loss_scale.py -k scaled_equals",
    ),
    # -- the ledger
    Fault(
        "the smaller last micro-batch weighs as much as the others",
        "splitting/micro_batches.py",
        "part_of(of_last, *arguments, rest, *take_rest(",
        "part_of(of_last, *arguments, plan[SIZE], *take_rest(",
        "end_to_end/test_equivalence.py -k dense-3-13-sgd",
    ),
    Fault(
        "the last micro-batch alone is in the accumulators",
        "accumulation/accumulators.py",
        "return self.map(add_to, self.sums, gradients)",
        "return self.map(ops.assign, self.sums, gradients)",
        "end_to_end/test_equivalence.py -k dense-3-13-sgd-graph",
    ),
    Fault(
        "each micro-batch is clipped",
        "accumulation/accumulators.py",
        "return self.map(add_to, self.sums, gradients)",
        "return self.map(add_to, self.sums, ops.clip_by_global_norm(gradients, 0.1))",
        "training/test_step.py -k clips_the_whole",
    ),
    Fault(
        "the loop is unrolled",
        "splitting/micro_batches.py",
        "    start = ms.Tensor(0, ms.int32)\n",
        "    start = 0\n",
        "training/test_step.py -k does_not_grow",
    ),
    Fault(
        "each micro-batch is reduced over ranks",
        "accumulation/ledger.py",
        "self.store.add(gradients))\n\n    def own_mean",
        "self.store.add(self.grad_reducer(gradients)))\n\n    def own_mean",
        "ranks/test_distributed.py -k one_reduction",
    ),
    Fault(
        "each batch of a window is reduced over ranks",
        "accumulation/ledger.py",
        "return self.open.end_batch(sums, items)",
        "return self.open.end_batch(ops.depend(sums, self.sum_over_ranks(self.store.read(sums), sums)), items)",
        "ranks/test_window_ranks.py -k 'one_reduction and eager'",
    ),
    Fault(
        "the smaller last micro-batch of what is counted is not run",
        "accumulation/window.py",
        "        if plan[micro_batches.REST] > 0:\n",
        "        if plan[micro_batches.REST] > 99:\n",
        "training/test_data_sinking.py -k as_the_whole_batches",
    ),
    Fault(
        "a sum is not divided by its count",
        "accumulation/ledger.py",
        "divisor = ops.select(least > 0, least, ops.ones_like(least)) * scale / self.factor",
        "divisor = scale / self.factor",
        "training/test_grad_accumulator.py -k equal_the_joined_batch[counted]",
    ),
    Fault(
        "a window is divided by what was dropped too",
        "accumulation/ledger.py",
        "return ops.select(belongs, ms.Tensor([0.0, 0.0, 1.0], ms.float32), row) if self.drops else row",
        "return ops.select(belongs, row + ms.Tensor([0.0, 0.0, 1.0], ms.float32), row) if self.drops else row",
        "accumulation/test_loss_scale.py -k left_out",
    ),
    Fault(
        "the denominators of a ratio are not read",
        "accumulation/measure.py",
        "counts.valid_or_nan(outputs[1])",
        "ms.Tensor(1.0, ms.float32)",
        "losses/test_counts.py -k 'unequal_counts and ratio'",
    ),
    Fault(
        "all losses have the first one's total",
        "accumulation/ledger.py",
        "totals = items if self.by_samples else self.sum_over_ranks.alone(items)",
        "totals = ops.ones_like(items) * ops.unstack(items)[0]",
        "losses/test_counts.py -k own_total",
    ),
    Fault(
        "counts of a loop are not read",
        "training/grad_accumulator.py",
        "count = checked_count(count)",
        "count = checked_count(1.0)",
        "training/test_grad_accumulator.py -k equal_the_joined_batch[counted]",
    ),
    Fault(
        "each batch of a window updates",
        "accumulation/open_window.py",
        "ops.logical_and(position >= self.window_steps,",
        "ops.logical_and(position > 0,",
        "accumulation/test_windows.py -k nothing_that_is_trained",
    ),
    Fault(
        "a tail is divided as a whole window",
        "accumulation/ledger.py",
        "least = counts.at_least(total, self.min_count)",
        "least = counts.at_least(total * self.open.window_steps / self.open.window_position, self.min_count)",
        "accumulation/test_windows.py -k flushed_tail",
    ),
    Fault(
        "the accumulators of a window go on in the next",
        "accumulation/open_window.py",
        "cleared = self.accumulators.reset(after)",
        "cleared = after",
        "accumulation/test_windows.py -k flushed_tail",
    ),
    Fault(
        "noise is of micro-batches with one item each",
        "accumulation/ledger.py",
        "self.noise.note(gradients, unit, counts.float32(items))",
        "self.noise.note(gradients, unit, ms.Tensor(1.0, ms.float32))",
        "accumulation/test_noise_record.py -k records_of_a_batch",
    ),
    Fault(
        "the whole batch is noted as a micro-batch too",
        "accumulation/ledger.py",
        "        loss = sums / scale\n",
        "        loss = ops.depend(sums, self.noise.note(gradients, unit, ms.Tensor(12.0, ms.float32))) / scale\n",
        "accumulation/test_noise_record.py -k records_of_a_batch",
    ),
    Fault(
        "a loss of the whole batch is one of each micro-batch",
        "accumulation/assembly.py",
        "    if setup.of_batch:\n",
        "    if setup.of_batch and not setup.of_batch:\n",
        "losses/test_batch_loss.py -k test_equals_the_whole_batch",
    ),
    Fault(
        "samples get the slopes of others",
        "accumulation/grad_cache.py",
        "slopes = (*slopes, gradients[index])",
        "slopes = (*slopes, ops.flip(gradients[index], (0,)))",
        "losses/test_batch_loss.py -k test_equals_the_whole_batch",
    ),
    Fault(
        "a loss's own Parameters have no gradient",
        "accumulation/grad_cache.py",
        "            weight = ops.cast(self.loss_weights[index], ms.float32)\n",
        "            weight = ops.stop_gradient(ops.cast(self.loss_weights[index], ms.float32))\n",
        "losses/test_batch_loss.py -k test_equals_the_whole_batch",
    ),
    # -- accumulators and kernels
    Fault(
        "what rounding takes is not kept",
        "accumulation/accumulators.py",
        "lost = (old - ops.cast(rounded, ms.float32)) + addend",
        "lost = addend * 0",
        "accumulation/test_accumulators.py -k compensation",
    ),
    Fault(
        "the compensation is not read",
        "accumulation/accumulators.py",
        "return ops.cast(accumulator, ms.float32) + compensation",
        "return ops.cast(accumulator, ms.float32)",
        "accumulation/test_accumulators.py -k compensation",
    ),
    Fault(
        "the compensation is not cleared",
        "accumulation/accumulators.py",
        "return ops.depend(after, self.map(zero, ops.depend(self.compensations, cleared)))",
        "return ops.depend(after, cleared)",
        "accumulation/test_accumulators.py",
    ),
    Fault(
        "half of a gradient is added",
        "cpu/kernels.py",
        "(parameter, -1.0, 0.0, 0.0, value)",
        "(parameter, -0.5, 0.0, 0.0, value)",
        "cpu/test_kernels.py",
    ),
    Fault(
        "all numbers are finite",
        "cpu/kernels.py",
        "gradients)) == 0",
        "gradients)) != 1",
        "cpu/test_kernels.py",
    ),
    # -- the update
    Fault(
        "the norm is squared",
        "transforms/norms.py",
        "return ops.sqrt(square_norm(gradients))",
        "return square_norm(gradients)",
        "training/test_step.py -k clips",
    ),
    Fault(
        "a small gradient is made larger",
        "transforms/norms.py",
        "factor = max_norm / ops.maximum(norm, ms.Tensor(max_norm, ms.float32))",
        "factor = max_norm / norm",
        "training/test_step.py -k clips",
    ),
    Fault(
        "each rank judges by its own norm",
        "transforms/skip_spikes.py",
        "if self.ranks > 1:  # processors",
        "if self.ranks > 99:  # processors",
        "ranks/test_transforms_ranks.py -k differ",
    ),
    Fault(
        "the averages begin at zero",
        "transforms/weight_average.py",
        "if self.averaged_updates + 0 == 0:",
        "if self.averaged_updates + 0 < 0:",
        "transforms/test_transforms.py -k averages_begin",
    ),
    Fault(
        "the averages never move",
        "accumulation/update.py",
        "return self.transforms.after_update(loss)",
        "return loss",
        "transforms/test_transforms.py -k averages_are_those",
    ),
    Fault(
        "a veto is not heeded",
        "accumulation/update.py",
        "        if allowed:\n",
        "        if ops.logical_or(allowed, ops.logical_not(allowed)):\n",
        "transforms/test_transforms.py -k left_out_changes",
    ),
    Fault(
        "the loss scale is not divided out",
        "accumulation/update.py",
        "ops.partial(_divide, divisor / self.sens)",
        "ops.partial(_divide, divisor / divisor)",
        "accumulation/test_loss_scale.py -k scaled_equals",
    ),
    Fault(
        "an overflow updates all the same",
        "accumulation/update.py",
        "        overflow = ops.logical_not(finite)\n",
        "        overflow = ops.isnan(divisor)\n",
        "accumulation/test_loss_scale.py -k drops_the_window",
    ),
    Fault(
        "an infinite divisor is none",
        "accumulation/update.py",
        "finite = ops.isfinite(divisor)",
        "finite = ops.logical_not(ops.isnan(divisor))",
        "accumulation/test_loss_scale.py -k divisor",
    ),
    Fault(
        "the loss scale stays",
        "accumulation/update.py",
        "loss = ops.depend(loss, self._adjust_scale(overflow, counted, loss))",
        "loss = ops.depend(loss, overflow)",
        "accumulation/test_loss_scale.py -k drops_the_window",
    ),
    Fault(
        "each update counts twice",
        "accumulation/update.py",
        "ops.assign_add(self.update_count, ms.Tensor(1, ms.int32))",
        "ops.assign_add(self.update_count, ms.Tensor(2, ms.int32))",
        "accumulation/test_windows.py -k counters",
    ),
    Fault(
        "moving statistics do not move",
        "accumulation/update.py",
        "return self.statistics.move(loss) if self.has_statistics else loss",
        "return loss",
        "layers/test_window_batchnorm.py -k moving_statistics",
    ),
    # -- windows of several batches
    Fault(
        "each batch has its own unit",
        "accumulation/open_window.py",
        "unit = ops.select(ops.logical_and(unit == 0, expected > 0), new_unit, unit)",
        "unit = new_unit",
        "accumulation/test_windows.py -k batches_that_share",
    ),
    Fault(
        "a window ends one batch late",
        "accumulation/open_window.py",
        "ops.logical_and(position >= self.window_steps,",
        "ops.logical_and(position > self.window_steps,",
        "accumulation/test_windows.py -k counters",
    ),
    Fault(
        "an open window follows a new number at once",
        "accumulation/open_window.py",
        "steps = ops.select(first, self.accumulation_steps + 0, self.window_steps + 0)",
        "steps = self.accumulation_steps + 0",
        "callbacks/test_schedule.py -k open_window",
    ),
    Fault(
        "the sums of a window go on in the next",
        "accumulation/open_window.py",
        "ops.assign(self.window_sums, ops.depend(ops.zeros((SUMS + 1,), ms.float32), cleared))",
        "ops.depend(self.window_sums, cleared)",
        "accumulation/test_windows.py -k batches_that_share",
    ),
    Fault(
        "a window ends in a branch of the step's graph, which branches again",
        "training/step.py",
        "if self.called_by_python and self.end_window.branches:",
        "if self.called_by_python and self.end_window is None:",
        "training/test_memory_growth.py::test_memory_is_flat[windows]",
    ),
    Fault(
        "a branch within the loop",
        "accumulation/window.py",
        "            while runs:\n",
        "            if runs:\n",
        "training/test_memory_growth.py::test_memory_is_flat[count]",
    ),
    Fault(
        "Python writes by an operator, which grows",
        "backend/parameters.py",
        "    if not _written_in_place(parameter, value):\n",
        "    if True:\n",
        "training/test_memory_growth.py::test_memory_is_flat[tokens]",
    ),
    Fault(
        "a batch that failed half-way stays in its window",
        "accumulation/open_window.py",
        "        if began_no_batch:\n",
        "        if True:\n",
        "accumulation/test_windows.py -k half_way",
    ),
    Fault(
        "a batch whose update failed stays in its window",
        "accumulation/open_window.py",
        " and not self.is_full\n",
        "\n",
        "training/test_python_split.py training/test_grad_accumulator.py -k update_that_fails",
    ),
    Fault(
        "ranks get integers rounded to float32",
        "distributed/ranks.py",
        "if parameter.dtype in (ms.float16, ms.bfloat16, ms.float32):",
        "if True:",
        "ranks/test_distributed.py -k each_dtype",
    ),
    Fault(
        "assigned options are not checked",
        "training/admission.py",
        "    cell.check_options(is_whole=True)\n",
        "",
        "test_cell.py -k assigned_options",
    ),
    # -- a function as split
    Fault(
        "a batch that Python cuts is not expected to be larger than its first micro-batch",
        "training/python_split.py",
        "samples = [micro_batch[0].shape[0] for micro_batch in micro_batches]",
        "return [1.0] * len(micro_batches)",
        "training/test_python_split.py -k flush",
    ),
    Fault(
        "a batch of several micro-batches is as many batches",
        "accumulation/open_window.py",
        "overwrite(self.window_position, ms.Tensor(self.batches + 1, ms.int32))",
        "overwrite(self.window_position, ms.Tensor(self.batches + 2, ms.int32))",
        "training/test_python_split.py -k flush",
    ),
    Fault(
        "a new batch begins a new number of batches",
        "accumulation/open_window.py",
        "        if not self.batches:\n",
        "        if True:\n",
        "training/test_python_split.py -k new_number",
    ),
    Fault(
        "what is shared is cut",
        "splitting/micro_batches.py",
        "return value if axis < 0 else ops.gather(value, rows, axis)",
        "return ops.gather(value, rows, max(axis, 0))",
        "splitting/test_even_split.py -k as_long_as",
    ),
    # -- counts and several losses
    Fault(
        "a mask counts its entries",
        "losses/counts.py",
        "return ops.reduce_sum(ops.cast(inputs[self.position], ms.float32))",
        "return ops.reduce_sum(ops.ones_like(ops.cast(inputs[self.position], ms.float32)))",
        "losses/test_counts.py -k unequal_counts",
    ),
    Fault(
        "ignored labels count",
        "losses/counts_of_labels.py",
        "ops.cast(self.labels(inputs) != self.ignore_index, ms.float32)",
        "ops.cast(self.labels(inputs) == self.ignore_index, ms.float32)",
        "losses/test_counts.py -k not_ignored",
    ),
    Fault(
        "the shift of labels is forgotten",
        "losses/counts_of_labels.py",
        "labels[:, self.shift :] if self.shift > 0 else labels",
        "labels",
        "losses/test_counts.py -k counts_of_labels",
    ),
    Fault(
        "layers are judged as if all were in training mode",
        "layers/batchnorm.py",
        "if not as_now or _normalises_by_batch(cell)]",
        "]",
        "layers/test_batchnorm.py -k mode_at_the_first_run",
    ),
    Fault(
        "the optimizer's loss scale is left in norms",
        "accumulation/update.py",
        "self.max_grad_norm * self.scale_in_gradients)",
        "self.max_grad_norm)",
        "training/test_grad_accumulator.py -k optimizer_removes",
    ),
    Fault(
        "a remedy is named that does not work",
        "auditing/remedies.py",
        "if evidence.agrees(train(trial.cell)):",
        "if train(trial.cell) is not None:",
        "auditing/test_audit.py -k coupled_samples",
    ),
    Fault(
        "a negative count is taken",
        "losses/counts.py",
        "valid = ops.logical_and(numbers >= 0, ops.isfinite(numbers))",
        "valid = ops.isfinite(numbers)",
        "losses/test_counts.py -k bad_count",
    ),
    Fault(
        "a micro-batch that was left out is not told",
        "accumulation/ledger.py",
        "ops.select(belongs, ms.Tensor([0.0, 0.0, 1.0], ms.float32), row)",
        "ops.select(belongs, ms.Tensor([0.0, 0.0, 0.0], ms.float32), row)",
        "accumulation/test_loss_scale.py -k left_out",
    ),
    Fault(
        "a micro-batch whose gradient overflows is kept",
        "accumulation/ledger.py",
        "ops.logical_and(all_finite(gradients), ops.isfinite(numerator))",
        "ops.isfinite(numerator)",
        "accumulation/test_loss_scale.py -k left_out",
    ),
    Fault(
        "a counted gradient keeps the loss scale",
        "accumulation/ledger.py",
        "ops.ones_like(least)) * scale / self.factor",
        "ops.ones_like(least)) / self.factor",
        "accumulation/test_loss_scale.py -k removes",
    ),
    Fault(
        "ranks that sum are averaged",
        "accumulation/ledger.py",
        "self.factor = self.summed_ranks if by_samples else 1.0",
        "self.factor = 1.0",
        "ranks/test_window_ranks.py -k 'equals_all_its_batches and eager'",
    ),
    Fault(
        "losses have no weights",
        "accumulation/measure.py",
        "return ops.reduce_sum(parts * self.loss_weights), parts",
        "return ops.reduce_sum(parts), parts",
        "losses/test_counts.py -k own_total",
    ),
    Fault(
        "a loss without items spoils the others",
        "accumulation/ledger.py",
        "items > 0 if self.loss_is_mean else ops.logical_or(items > 0, numerators == numerators)",
        "items >= 0 if self.loss_is_mean else ops.logical_or(items > 0, numerators == numerators)",
        "losses/test_counts.py -k own_total",
    ),
    Fault(
        "a sum over nothing is left out",
        "accumulation/ledger.py",
        "return items > 0 if self.loss_is_mean else ops.logical_or(items > 0, numerator == numerator)",
        "return items > 0",
        "losses/test_nothing_counted.py -k belongs",
    ),
    Fault(
        "outputs are joined in another order",
        "splitting/micro_batches.py",
        "ops.concat((before[rows:], new))",
        "ops.concat((new, before[rows:]))",
        "accumulation/test_outputs.py -k change_nothing",
    ),
    Fault(
        "scalars have what is left out",
        "accumulation/ledger.py",
        "output = ops.select(taken, output, ops.zeros_like(output))",
        "output = output + 0.0",
        "accumulation/test_outputs.py -k 'change_nothing and masked'",
    ),
    Fault(
        "a batch without counts weighs alike",
        "training/grad_accumulator.py",
        "weight = weight * items",
        "weight = weight + 0.0",
        "training/test_grad_accumulator.py -k counted",
    ),
    Fault(
        "a loop's batches have one sample",
        "training/gradients_of_batch.py",
        "gradients.samples = first.shape[0]",
        "gradients.samples = 1",
        "training/test_grad_accumulator.py -k equal_the_joined_batch[samples]",
    ),
    Fault(
        "samples of a call outlive it",
        "training/grad_accumulator.py",
        "calls = self._calls.take()",
        "calls = self._calls",
        "training/test_grad_accumulator.py -k skipped",
    ),
    Fault(
        "a known sum is taken for a mean",
        "options/rules.py",
        "given is not None or stated is None or stated.reduction",
        "given is not None or stated is None or True or stated.reduction",
        "losses/test_stated_reduction.py -k stays_a_sum",
    ),
    Fault(
        "the reduction of an operator in a loss is not read",
        "losses/stated_reduction.py",
        "for value in (loss, *(value for _, value in held_values(loss)))",
        "for value in (loss,)",
        "losses/test_stated_reduction.py -k says_its",
    ),
    Fault(
        "sums of a loop are divided by the batches",
        "accumulation/ledger.py",
        "is_sum = self.rule == TOTALS",
        "is_sum = self.rule == COUNTS",
        "losses/test_stated_reduction.py -k loop_stay_sums",
    ),
    Fault(
        "a loop's losses weigh alike",
        "training/grad_accumulator.py",
        ".reshape(()) * weight * scale",
        ".reshape(()) * unit",
        "training/test_grad_accumulator.py -k records",
    ),
    # -- losses of the whole batch
    Fault(
        "each micro-batch adds the loss's own gradient whole",
        "accumulation/grad_cache.py",
        "ops.cast(loss_slopes[index], ms.float32)) * share",
        "ops.cast(loss_slopes[index], ms.float32))",
        "losses/test_batch_loss.py -k test_equals_the_whole_batch",
    ),
    Fault(
        "representations come in another order",
        "accumulation/grad_cache.py",
        "ops.concat((before[rows:], new[index]))",
        "ops.concat((new[index], before[rows:]))",
        "losses/test_batch_loss.py -k test_equals_the_whole_batch",
    ),
    Fault(
        "the first pass is a plain call, which MindSpore's compiler takes for the second pass",
        "accumulation/grad_cache.py",
        "return self.with_gradient(ms.Tensor(0.0, ms.float32), *inputs)[0][1:]",
        "return self.network.represent(*inputs)",
        "losses/test_batch_loss.py -k adds_in_place",
    ),
    Fault(
        "every rank counts the joined loss",
        "accumulation/grad_cache.py",
        "self.share_of_ranks = 1.0 if mean else 1.0 / self.network.ranks",
        "self.share_of_ranks = 1.0",
        "ranks/test_batch_loss_ranks.py -k test_gathered",
    ),
    # -- ranks
    Fault(
        "the mean over ranks is their sum",
        "distributed/all_reduce.py",
        "return summed * self.share if self.mean else summed",
        "return summed",
        "ranks/test_distributed.py -k 'same_ranks and graph'",
    ),
    Fault(
        "reduced gradients have the precision of a rank's own",
        "distributed/all_reduce.py",
        "return _reshape(_slice(buffer, (start,), (size,)), gradient.shape)",
        "return ops.cast(_reshape(_slice(buffer, (start,), (size,)), gradient.shape), gradient.dtype)",
        "ranks/test_distributed.py -k bfloat16",
    ),
    Fault(
        "reduced gradients come in the buffers' order",
        "distributed/all_reduce.py",
        "return self.take(result, self.places)",
        "return result",
        "distributed/test_all_reduce.py -k bit_by_bit",
    ),
    Fault(
        "a buffer is never full",
        "distributed/all_reduce.py",
        "        room -= size\n",
        "        room -= 0\n",
        "distributed/test_all_reduce.py -k plan",
    ),
    Fault(
        "slices that are cut short overlap wrongly",
        "distributed/layout.py",
        "rows[full, self.columns[index] - rest :]",
        "rows[full, :rest]",
        "distributed/test_sharded_optimizer.py -k slices_are_put_together",
    ),
    Fault(
        "a rank's record is broadcast",
        "backend/parameters.py",
        "requires_grad=False, layerwise_parallel=True)",
        "requires_grad=False)",
        "ranks/test_distributed.py -k broadcast",
    ),
    Fault(
        "a private name is not looked up",
        "backend/__init__.py",
        '"check_names_and_refresh_name", "compile_and_run", "compile_cache"',
        '"check_names_and_refresh_name", "compile_cache"',
        "backend/test_private_names.py",
    ),
    Fault(
        "an older MindSpore's ranks wait 30 s",
        "launch/cluster.py",
        "if _before_2_10() else",
        "if not _before_2_10() else",
        "launch/test_cluster.py",
    ),
    # -- resuming, callbacks, rates
    Fault(
        "a checkpoint is without the rates of experimental optimizers",
        "training/lifecycle.py",
        "        list_rates(cell, self._update.optimizer)\n",
        "",
        "training/test_newer_optimizers.py -k go_on_from_a_checkpoint[two-pynative]",
    ),
    Fault(
        "schedulers step for each batch",
        "callbacks/update_scheduler.py",
        "follow(record.update)",
        "follow(int(training_step(run_context).batch_count.asnumpy()))",
        "training/test_newer_optimizers.py -k go_on_from_a_checkpoint[two-pynative]",
    ),
    Fault(
        "a checkpoint is without the schedulers' state",
        "training/schedulers.py",
        "        list_schedulers(self, self.optimizer, schedulers, self.updates)\n",
        "",
        "training/test_newer_optimizers.py -k a_loops_scheduler_steps",
    ),
    Fault(
        "the data set begins anew",
        "checkpoint/resume.py",
        "begin_at(data_set, position, ",
        "begin_at(data_set, 0, ",
        "checkpoint/test_resume.py -k resumed_in_a_new_model",
    ),
    Fault(
        "a file's checksum is not compared",
        "backend/checkpoint_file.py",
        'if int.from_bytes(end[-10:], "big") != checksum:',
        "if not end:",
        "checkpoint/test_newest.py -k file_with_a_checksum",
    ),
    Fault(
        "a window goes on without its sums",
        "checkpoint/contents.py",
        "if missing := records - values.keys() if ours else set():",
        "if missing := set():",
        "checkpoint/test_resume.py -k refuses_and_changes_nothing",
    ),
    Fault(
        "the weights alone are taken",
        "checkpoint/contents.py",
        "if state and missing_state == state:",
        "if not values:",
        "checkpoint/test_resume.py -k weights_alone",
    ),
    Fault(
        "Parameters that share a name get those of their places in our step",
        "training/step.py",
        "        self._lifecycle.refresh_names()\n",
        "        super().check_names_and_refresh_name()\n",
        "training/test_lifecycle.py",
    ),
    Fault(
        "files of different updates are joined",
        "checkpoint/rank_files.py",
        'if len({int(values.get(own("update_count"), 0)) for _, values in files}) > 1:',
        "if not files:",
        "checkpoint/test_resume.py -k different_updates",
    ),
    Fault(
        "other ranks' losses are lost when a window is joined",
        "checkpoint/rank_files.py",
        'joined[own("window_sums")][LOSS] = np.dot(factors, [values[own("window_sums")][LOSS] for values in files])',
        'joined[own("window_sums")][LOSS] = files[0][own("window_sums")][LOSS]',
        "checkpoint/test_resume.py ranks/test_window_ranks.py -k 'one_process or joined'",
    ),
    Fault(
        "an epoch's tail is not flushed",
        "callbacks/flush.py",
        "return int(step.window_position.asnumpy() > 0)",
        "return 0",
        "accumulation/test_windows.py -k flushes",
    ),
    Fault(
        "each record is one of an update",
        "record/window_notes.py",
        "updated=updated,",
        "updated=True,",
        "record/test_recorder.py -k overflow",
    ),
    Fault(
        "callbacks do not see flushed windows",
        "record/recorder.py",
        "self._step.around_flush = self._around_flush",
        "pass",
        "record/test_recorder.py -k flush",
    ),
    Fault(
        "a multiplied rate stays",
        "learning_rate.py",
        "return rate * scale * self.multiplier",
        "return rate * scale",
        "test_lr.py -k multiplied",
    ),
    Fault(
        "rates per update do not warm up",
        "learning_rate.py",
        "return [each_rate * (1 - grown + scale * grown)",
        "return [each_rate * scale",
        "test_lr.py -k 'warm or by_hand'",
    ),
    Fault(
        "the noise is that of the last micro-batch",
        "accumulation/noise.py",
        "return ops.assign_add(self.window_squares, ",
        "return ops.assign(self.window_squares, ",
        "accumulation/test_noise_record.py -k records_of_a_batch",
    ),
    Fault(
        "outputs are not checked at another number of samples",
        "accumulation/window.py",
        "        rows = 1 + (2 if finds_size else plan.size)\n",
        "        rows = 2 if finds_size else plan.size\n",
        "accumulation/test_outputs.py -k no_samples_on_axis_0",
    ),
    Fault(
        "the noise is that of one item",
        "accumulation/noise.py",
        "counts.ratio_or_zero(norms.square_norm(gradients) / (unit * unit), items)",
        "norms.square_norm(gradients) / (unit * unit)",
        "accumulation/test_noise_record.py -k records_of_a_batch",
    ),
    Fault(
        "what a step lends stays for ever",
        "backend/lent.py",
        "    _finalize(owner, _take_back, weakref.ref(target), key)\n",
        "",
        "end_to_end/test_side_effects.py -k two_steps",
    ),
    Fault(
        "what two steps need goes with the first",
        "backend/lent.py",
        "    if loan.owners:\n        return\n",
        "",
        "end_to_end/test_side_effects.py -k two_steps",
    ),
    Fault(
        "the cell is imported without the hook",
        "cell.py",
        "\ninstall_model_hook()\n",
        "\n",
        "end_to_end/test_package.py",
    ),
    Fault(
        "sharing is the remedy for labels that are broadcast",
        "auditing/measure.py",
        "    if broadcast is not None:\n",
        "    if False:\n",
        "auditing/test_remedies.py -k broadcast",
    ),
    Fault(
        "a network with forward hooks is called twice in a graph",
        "backend/random_operators.py",
        "_draws(cell) or has_forward_hooks(cell) for",
        "_draws(cell) for",
        "layers/test_hooks.py -k acts_once",
    ),
    Fault(
        "a compiled update goes on with old settings of the optimizer's groups",
        "training/lifecycle.py",
        "        refuse_changed_settings(self._record.owner, self._update.optimizer, self._settings)\n",
        "",
        "training/test_newer_optimizers.py -k settings",
    ),
    Fault(
        "a mean's eager gradient is divided by the first micro-batch's size",
        "backend/graphs.py",
        "        with mean_of_elements():\n            return nn.Cell.__call__(cell, *inputs)\n",
        "        return nn.Cell.__call__(cell, *inputs)\n",
        "backend/test_eager_means.py",
    ),
    # -- tools and processes
    Fault(
        "the search stops at the smallest sizes",
        "memory/forecast.py",
        "if size <= max(1, 2 * largest)]",
        "if size <= max(1, largest)]",
        "memory/test_forecast.py -k sizes_double",
    ),
    Fault(
        "a size is tried that is predicted not to fit",
        "memory/forecast.py",
        "        return self.keeps(self.predict(size) if peak is None else peak)\n",
        "        return peak is None or self.keeps(peak)\n",
        "memory/test_forecast.py -k sizes_double",
    ),
    Fault(
        "a smaller last micro-batch has no memory of its own",
        "memory/trial.py",
        "size + self.samples % size",
        "size",
        "memory/test_forecast.py -k sizes_double",
    ),
    Fault(
        "a trial updates",
        "memory/trial.py",
        "self._optimizer if self._updates else _NoUpdate(self._optimizer)",
        "self._optimizer",
        "memory/test_trial.py -k updates_nothing",
    ),
    Fault(
        "the optimizer's state is left out",
        "memory/trial.py",
        "        return known + bytes_of(",
        "        return known * bytes_of(",
        "memory/test_trial.py -k updates_nothing",
    ),
    Fault(
        "a trial is ended after it has passed its limit, not before",
        "memory/child.py",
        "        if free < (size - before if before else 0):",
        "        if free < 0:",
        "memory/test_child.py -k before_it_has_too_much",
    ),
    Fault(
        "what a copy shares counts twice",
        "memory/child.py",
        'peak - after["RssFile"] - before, after',
        'peak - after["RssFile"], after',
        "memory/test_child.py -k growth_is_measured",
    ),
    Fault(
        "a trial whose copy waits for ever is given up",
        "memory/child.py",
        "    for _ in range(_COPIES - 1):\n",
        "    for _ in range(0):\n",
        "memory/test_child.py -k that_it_lacks",
    ),
    Fault(
        "ranks share no cores",
        "launch/cluster.py",
        "str(max(1, cores // self.processes))",
        "str(cores)",
        "launch/test_cluster.py -k share_the_cores",
    ),
    Fault(
        "what a killed guard leaves belongs to nobody",
        "launch/guard.py",
        "    adopt_orphans()\n    job, role",
        "    job, role",
        "launch/test_hidden.py -k launcher-guards",
    ),
    Fault(
        "anybody may say that a rank has ended",
        "launch/guard.py",
        "senders[0] in (os.getuid(), 0)",
        "True",
        "launch/test_guard.py -k other_users",
    ),
    Fault(
        "a killed guard is noticed late",
        "launch/supervisor.py",
        "        self._without_guard = gone\n",
        "",
        "launch/test_supervisor.py -k guard_is_killed",
    ),
    Fault(
        "a broken device is tried again and again",
        "launch/restarts.py",
        "again, self._failed = failed is not None and failed == self._failed, failed",
        "again, self._failed = False, failed",
        "launch/test_restarts.py -k what_follows",
    ),
    Fault(
        "a wrong argument is tried again after init()",
        "launch/supervisor.py",
        "or rank in self._by_argparse",
        "or False",
        "launch/test_supervisor.py -k of_argparse",
    ),
    Fault(
        "a guard without logs reports nothing",
        "launch/guard.py",
        "    finally:  # also",
        "    except ZeroDivisionError:  # also",
        "launch/test_guard.py -k cannot_write",
    ),
    Fault(
        "windows that compile rule the scale of the report",
        "report/page.py",
        "field in TIMED and window.slow for",
        "False for",
        "report/test_report_page.py -k that_compile",
    ),
    Fault(
        "spikes are looked for behind a clip",
        "accumulation/update.py",
        "        compatibility.check(UPDATE, owner, Setup(options, optimizer))  # its rules look at options alone\n",
        "",
        "transforms/test_transforms.py -k spikes",
    ),
    Fault(
        "batches are counted by the ranks that saved them",
        "checkpoint/other_ranks.py",
        "    return epochs * here.epoch_batches + seen // here.all_batches\n",
        "    return epochs * here.epoch_batches + batches\n",
        "checkpoint/test_other_ranks.py",
    ),
    Fault(
        "an open window ends too early on fewer ranks",
        "checkpoint/other_ranks.py",
        "    if ratio == 1:\n        return values\n    is_open",
        "    if True:\n        return values\n    is_open",
        "checkpoint/test_other_ranks.py ranks/test_fewer_ranks.py",
    ),
    Fault(
        "an order that depends on the ranks is not warned of",
        "backend/data_sets.py",
        """        if _operation(data_set) == "Shuffle":\n""",
        """        if _operation(data_set) == "":\n""",
        "backend/test_data_sets.py checkpoint/test_other_ranks.py",
    ),
    Fault(
        "ranks go on from what not all have",
        "checkpoint/newest.py",
        "        if all(key in keys for keys in others):\n",
        "        if True:\n",
        "checkpoint/test_newest.py -k agree",
    ),
    # -- micro-batches by length
    Fault(
        "rows of padding repeat samples",
        "splitting/token_plan.py",
        "np.concatenate([samples, np.full(free, NOBODY)])",
        "np.resize(samples, samples.size + free)",
        "splitting/test_max_tokens.py -k equals_the_whole",
    ),
    Fault(
        "padding is guessed from a batch that has none",
        "splitting/max_tokens.py",
        "if self._fillers is not None or length == rows.before:",
        "if length == rows.before:\n            return (0,) * len(rows.arrays)\n        if self._fillers is not None:",
        "splitting/test_max_tokens.py -k evidence",
    ),
    Fault(
        "a row of padding may count in a ratio",
        "training/python_split.py",
        'return [("the denominator of a ratio", denominator), ("the numerator of a ratio", numerator)]',
        "return []",
        "splitting/test_max_tokens.py -k in_a_ratio",
    ),
    Fault(
        "a step splits by the user's object",
        "training/python_split.py",
        "options.split.working_copy()",
        "options.split",
        "splitting/test_max_tokens.py -k serves_two_steps",
    ),
    Fault(
        "state that a compiled update loses is not looked for",
        "backend/python_state.py",
        "if reached.may_write:",
        "if False:",
        "backend/test_python_state.py -k found_by_its_name",
    ),
    Fault(
        "a search for state leaves what it wrote",
        "backend/python_state.py",
        "place.write(old)",
        "pass",
        "backend/test_python_state.py -k found_by_its_name",
    ),
    Fault(
        "a list that is written by another name is not seen",
        "backend/python_state.py",
        "if instruction.opname in _STORES or is_outer:",
        'if instruction.opname in _STORES - {"STORE_SUBSCR"} or is_outer:',
        "backend/test_python_state.py -k alias",
    ),
    Fault(
        "training in evaluation mode is not told",
        "layers/evaluation_mode.py",
        "if any(cell.training for cell in cells):",
        "if cells:",
        "training/test_advice.py -k evaluation_mode",
    ),
    # -- the proof at the first batch
    Fault(
        "a remedy that fits the few samples is named, whatever the micro-batches show",
        "proof/verdict.py",
        "if remedy.fits(comparison) and remedy.holds(group):",
        "if remedy.fits(comparison):",
        "proof/test_first_batch.py -k must_fit",
    ),
    Fault(
        "noise of a row depends on the rows beside it",
        "backend/noise_of_rows.py",
        "return np.stack([draw(np.random.default_rng((number, row)), others) for row in rows], axis)",
        "return draw(np.random.default_rng(number), tuple(shape))",
        "proof/test_first_batch.py -k Variational",
    ),
    Fault(
        "the proof leaves what construct wrote",
        "backend/without_effect.py",
        "        before.restore_values()\n        outside.restore(generators=True)\n",
        "",
        "training/test_check.py -k same_bits",
    ),
    Fault(
        "a collective of the loss is run by the proof",
        "proof/first_batch.py",
        "noise_of_rows(group_size_or_1() > 1)",
        "noise_of_rows(False)",
        "ranks/test_check_ranks.py",
    ),
    Fault(
        "outputs stay in the order of the micro-batches",
        "splitting/token_plan.py",
        'return places[np.argsort(rows[places], kind="stable")]',
        "return places",
        "splitting/test_max_tokens.py -k outputs_come_back",
    ),
    Fault(
        "a micro-batch has one row too many",
        "splitting/token_plan.py",
        "rows = max_tokens // widths[place]",
        "rows = max_tokens // widths[place] + 1",
        "splitting/test_token_plan.py",
    ),
    Fault(
        "labels are padded with zeros",
        "splitting/token_rows.py",
        "shape[1:]), filler, array.dtype)",
        "shape[1:]), 0, array.dtype)",
        "splitting/test_max_tokens.py -k equals_the_whole",
    ),
    Fault(
        "a trial trains on the largest width alone",
        "splitting/worst_case.py",
        "for width in self.widths]",
        "for width in self.widths[-1:]]",
        "splitting/test_auto_tokens.py -k worst_case",
    ),
    Fault(
        "uneven ranks swap nothing",
        "splitting/balanced_sampler.py",
        "    _swap(costs, result)\n",
        "",
        "splitting/test_balanced_sampler.py",
    ),
    # -- pipelines
    Fault(
        "each micro-batch of a pipeline is the first",
        "semi_auto/pipeline.py",
        "(0, begin, 0), (self.parts, end, numbers)",
        "(0, 0, 0), (self.parts, end - begin, numbers)",
        "semi_auto/test_pipelines.py -k every_stage",
    ),
    Fault(
        "the sums of a pipeline stay on its last stage",
        "semi_auto/unrolled_window.py",
        "self.has_stages = stages() > 1",
        "self.has_stages = False",
        "semi_auto/test_pipelines.py -k every_stage",
    ),
    Fault(
        "fewer micro-batches than stages are let through",
        "semi_auto/pipeline.py",
        "if (micro_size or 1) < number:",
        "if not number:",
        "semi_auto/test_pipelines.py -k alike",
    ),
    Fault(
        "semi-auto: all losses have the first one's factor in the backward",
        "semi_auto/batch_sums.py",
        "dout * factors[position // self.step]",
        "dout * factors[0]",
        "semi_auto/test_batch_sums.py -k 'two and sums and dp'",
    ),
    Fault(
        "semi-auto: a window's sum without a count is divided by its samples",
        "semi_auto/batch_sums.py",
        "ops.ones_like(total) if self.is_plain_sum else ",
        "",
        "semi_auto/test_windows.py -k 'three_batches and sum'",
    ),
    Fault(
        "semi-auto: a checkpoint is saved in a window",
        "semi_auto/modes.py",
        "if batches and not step.run_record.training_ended and sys.exc_info()[0] is None:",
        "if False:",
        "semi_auto/test_modes.py -k take_turns",
    ),
    Fault(
        "semi-auto: a batch that is not cut is compiled once, and its norm is of each device",
        "semi_auto/compiled_once.py",
        "is_cut = (options.micro_size or 1) > 1",
        "is_cut = True",
        "semi_auto/test_graphs.py -k 'same_precision and ratio'",
    ),
]

FAULTS += [fault for file in sorted((ROOT / "tests" / "faults").glob("*.txt")) for fault in read(file)]


def run(fault: Fault, folder: Path) -> str:
    """The result of the tests: "found", or why not."""
    file = folder / "gaccum_ms" / fault.file
    text = file.read_text()
    if text.count(fault.right) != 1:
        return f"STALE: {fault.file} has its text {text.count(fault.right)} times"
    words, _, chosen = fault.tests.partition(" -k ")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += [f"tests/{word}" for word in words.split()] + (["-k", chosen.strip("'")] if chosen else [])
    environment, codes = {**os.environ, "PYTHONPATH": str(folder)}, set()
    file.write_text(text.replace(fault.right, fault.wrong))
    try:
        for tier in ("not thorough", "thorough"):
            done = subprocess.run(
                [*command, "-m", tier], cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT
            )
            if done.returncode == 1:
                return "found"
            codes.add(done.returncode)
    except subprocess.TimeoutExpired:
        return f"NOT FINISHED in {LIMIT} s"
    finally:
        file.write_text(text)
    if 0 in codes and codes <= {0, 5}:  # 5: there are no tests of this tier
        return "SURVIVES"
    return f"NOT RUN: {done.stdout[-300:]}{done.stderr[-300:]}"


def sample(faults: list[Fault], number: int, seed: int) -> list[Fault]:
    """So many of the faults, of as many files as there are, in their order."""
    mixed = random.Random(seed).sample(faults, len(faults))
    first = {fault.file: fault for fault in reversed(mixed)}  # the first of each file
    mixed.sort(key=lambda fault: fault is not first[fault.file])
    return sorted(mixed[:number], key=faults.index)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/mutations.py", description=__doc__)
    parser.add_argument(
        "words", nargs="*", help="the faults, or their files, that have one of these words; by default all"
    )
    parser.add_argument("--sample", type=int, metavar="N", help="of these, run only N, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    options = parser.parse_args()
    words = options.words
    chosen = [fault for fault in FAULTS if not words or any(word in fault.what or word in fault.file for word in words)]
    chosen = chosen if options.sample is None else sample(chosen, options.sample, options.seed)
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
    jobs = len(os.sched_getaffinity(0))

    def attempt(fault: Fault) -> bool:
        folder, begin = copies.get(), time.monotonic()
        said = run(fault, folder)
        copies.put(folder)
        print(f"{fault.what}: {said} ({time.monotonic() - begin:.0f} s)", flush=True)
        return said == "found"

    ignored = shutil.ignore_patterns(".git", ".venv*", "build", "__pycache__", "data")
    with tempfile.TemporaryDirectory(prefix="gaccum_ms_mutations_") as name, ThreadPoolExecutor(jobs) as pool:
        for number in range(jobs):
            copies.put(Path(shutil.copytree(ROOT, Path(name, str(number), "project"), ignore=ignored)))
        found = sum(pool.map(attempt, chosen))
    print(f"{found} of {len(chosen)} found")
    return int(found != len(chosen))


if __name__ == "__main__":
    sys.exit(main())
