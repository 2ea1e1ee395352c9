"""The weight of a micro-batch in its window, and the divisor of the window's sums.

* `BySamples` weights micro-batches by their numbers of samples, which are constants. Seeds are shares, sums are means.
* `ByCounts` weights them by counts that depend on the data; micro-batches may be left out. The rank first counts its
  own micro-batches and seeds them with their shares; reduction.py then computes the mean over all ranks.
* `ByCountsWithOutputs` runs forward and backward before it decides whether to add them. It is for networks that return
  their count, or outputs (outputs.py): outputs cover all samples, even those of a micro-batch that is left out.
* `ByCountsOfEach` handles several losses, each with its own total (several_losses.py).

Each kind has these methods, which are compiled:

    unit                the seed of a micro-batch of one item
    zero_sums           the initial value of the loop's sums
    run_and_add         forward, backward and add one micro-batch, unless it is left out
    reduce              over ranks: gradients, their divisor, the loss, whether there is an update
"""

from __future__ import annotations

from typing import NamedTuple

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.accumulation import micro_batches
from gaccum_ms.accumulation.counting import Counting
from gaccum_ms.accumulation.noise import NoiseRecord
from gaccum_ms.accumulation.reduction import CountedReduction
from gaccum_ms.accumulation.sums import COUNT, DROPPED
from gaccum_ms.backend.parameters import hold_weights
from gaccum_ms.cpu.kernels import all_finite
from gaccum_ms.losses import counts
from gaccum_ms.options.options import Options


class WeighingParts(NamedTuple):
    """The arguments of a weighing."""

    options: Options
    weights: ms.ParameterTuple
    grad_reducer: nn.Cell  # over ranks
    micro_step: nn.Cell  # forward and backward
    store: nn.Cell  # where gradients are added up
    position: ms.Parameter | None  # if a window has several batches, the number of them so far


class BySamples(nn.Cell):
    """Weights micro-batches by samples. `sums` : the loss. A loss that is not a mean over samples has weight 1."""

    may_skip = False  # whether a window may have to make no update
    needs_division = False  # False: the seeds hold the shares, so the window divides by the loss scale alone
    weighs_samples = False  # whether the window adds up numbers of samples, as open windows do
    leaves_out = False  # whether a micro-batch may be left out

    def __init__(self, parts: WeighingParts) -> None:
        super().__init__(auto_prefix=False)
        options, _, grad_reducer, micro_step, store, _ = parts
        self.micro_step = micro_step
        self.store = store
        self.grad_reducer = grad_reducer
        self.loss_is_mean = micro_step.loss_is_mean
        self.records_noise = options.record_noise
        if options.record_noise:
            self.noise = NoiseRecord(grad_reducer)

    def unit(self, inputs, plan, scale):
        return scale / plan[micro_batches.SAMPLES] if self.loss_is_mean else scale

    def items(self, size):
        """The factor between `unit` and a micro-batch's seed."""
        return size if self.loss_is_mean else 1

    def zero_sums(self):
        return ms.Tensor(0.0, ms.float32)

    def run(self, unit, prepared, size, *micro_batch):
        """A micro-batch's part of the sums (with outputs, a tuple that begins with it), and its gradients."""
        part, gradients = self.micro_step.run(unit * self.items(size), prepared, size, *micro_batch)
        if self.records_noise:
            part = ops.depend(part, self.noise.note(gradients, unit, counts.float32(size)))
        return part, gradients

    def run_and_add(self, unit, prepared, size, *micro_batch):
        # Passed with `*` : graph mode forgets the length of a tuple of equal shapes inside an `if` on a Tensor.
        part, gradients = self.run(unit, prepared, size, *micro_batch)
        return ops.depend(part, self.store.add(gradients))

    def own_mean(self, parts, sums, scale, unit):
        """This rank's mean of the loss, or of an output of shape (), from its summed parts, without loss scale."""
        return parts / scale

    def reduce(self, gradients, sums, scale, unit):
        loss = sums / scale
        if not self.records_noise:
            return self.grad_reducer(gradients), scale, loss, True
        gradients, recorded = self.noise.reduce(self.grad_reducer, gradients, unit / scale, loss)
        return gradients, scale, ops.depend(loss, recorded), True


class ByCounts(nn.Cell):
    """Weights micro-batches by counts; they may be left out. `sums` : the loss, the count, dropped micro-batches."""

    may_skip = True
    needs_division = True
    runs_all = False  # whether micro-batches that count nothing run too

    def __init__(self, parts: WeighingParts) -> None:
        super().__init__(auto_prefix=False)
        options, weights, _, micro_step, store, position = parts
        hold_weights(self, weights)
        self.micro_step = micro_step
        self.store = store
        self.drops = options.drops
        self.loss_is_mean = micro_step.loss_is_mean
        # Where a micro-batch may be left out: before it runs, and after.
        self.may_not_run = self.loss_is_mean and options.counts_items and not self.runs_all
        self.judges = options.drops or (options.counts_items and not self.may_not_run)
        self.leaves_out = self.may_not_run or self.judges
        self.counting = Counting(options)
        self.weighs_samples = not options.counts_items
        # A loss that is a sum without a count has no divisor; windows that span batches allow it.
        self.is_mean = self.loss_is_mean or not self.weighs_samples
        self.min_count = options.min_count
        self.reduction = CountedReduction(
            weights, self.weighs_samples, self.is_mean, self.min_count, options.record_noise, position
        )
        self.records_noise = options.record_noise
        if options.record_noise:
            self.noise = self.reduction.noise
        self.window_count = self.reduction.window_count
        self.dropped_micro_batches = self.reduction.dropped_micro_batches

    def unit(self, inputs, plan, scale):
        """The loss scale over this rank's own total. Gradients and accumulators are then as small as the whole batch's,
        and overflow no earlier in low precision. `reduce` undoes this division."""
        total = self.expected(self.counting.total(inputs, plan))
        return scale / ops.select(total > 0, total, ops.ones_like(total))

    def expected(self, total):
        """The total from which the unit is computed, this rank's own. NaN if a count is bad."""
        return self.count_for_seed(total)

    def count_for_seed(self, count):
        """A count that the unit can be computed from, if anything is added with it."""
        return count if self.loss_is_mean else counts.one_if_zero(count)

    def zero_sums(self):
        return ms.Tensor([0.0, 0.0, 0.0], ms.float32)

    def add_up(self, *arguments):
        """The loop over a batch's micro-batches. An inner loop runs once or not at all: see the rules at the head of
        step.py."""
        return self.add_up_taken(*arguments) if self.judges else self.add_up_counted(*arguments)

    def add_up_counted(self, sums, inputs, plan, unit, prepared):
        """For micro-batches that may be left out before they run."""
        axes = plan[micro_batches.AXES]
        start = ms.Tensor(0, ms.int32)
        while start < plan[micro_batches.LOOPED]:
            rows = micro_batches.rows_from(start, plan)
            micro_batch = micro_batches.take(inputs, start, rows, axes)
            count = self.count_before(micro_batch)
            part = self.left_out(count)
            runs = self.runs(count)
            while runs:
                ran, gradients = self.run(unit, prepared, rows, count, *micro_batch)
                part = self.added(unit, ran, gradients)
                runs = ms.Tensor(False)
            sums = sums + part
            start = start + rows
        return sums

    def add_up_taken(self, sums, inputs, plan, unit, prepared):
        """For micro-batches that may be left out after they ran too."""
        axes = plan[micro_batches.AXES]
        start = ms.Tensor(0, ms.int32)
        while start < plan[micro_batches.LOOPED]:
            rows = micro_batches.rows_from(start, plan)
            micro_batch = micro_batches.take(inputs, start, rows, axes)
            count = self.count_before(micro_batch)
            part = self.left_out(count)
            runs = self.runs(count)
            while runs:
                ran, gradients = self.run(unit, prepared, rows, count, *micro_batch)
                part = self.rejected(ran)
                takes = self.takes(ran, gradients)
                while takes:
                    part = self.added(unit, ran, gradients)
                    takes = ms.Tensor(False)
                runs = ms.Tensor(False)
            sums = sums + part
            start = start + rows
        return sums

    def run_and_add(self, unit, prepared, size, *micro_batch):
        """One micro-batch, outside of a loop."""
        count = self.count_before(micro_batch)
        part = self.left_out(count)
        if not self.may_not_run or self.runs(count):
            part = self.run_and_judge(unit, prepared, size, count, *micro_batch)
        return part

    def run_and_judge(self, unit, prepared, size, count, *micro_batch):
        ran, gradients = self.run(unit, prepared, size, count, *micro_batch)
        if not self.judges:
            return self.added(unit, ran, gradients)
        return self.judged(unit, ran, *gradients)

    def judged(self, unit, ran, *gradients):
        """Adds a micro-batch that ran, unless it is left out."""
        part = self.rejected(ran)
        if self.takes(ran, gradients):
            part = self.added(unit, ran, gradients)
        return part

    def count_before(self, micro_batch):
        """The count of a micro-batch before it runs."""
        return self.counting.of(*micro_batch)

    def runs(self, count):
        """Whether a micro-batch runs. A mean over no items is NaN, and so is its gradient."""
        return count > 0 if self.may_not_run else ms.Tensor(True)

    def run(self, unit, prepared, size, count, *micro_batch):
        """Returns ``(the seeded loss, the count)`` , and the gradients."""
        seed = unit * count if self.loss_is_mean else unit
        seeded_loss, gradients = self.micro_step.run(seed, prepared, size, *micro_batch)
        return (seeded_loss, count), gradients

    def belongs(self, ran):
        """Whether a micro-batch that ran belongs to the window. A mean over no items does not. A sum or a numerator
        over no items is a number, and does; NaN there is a mean over no items that was multiplied by their number."""
        seeded_loss, count = ran[0], ran[1]
        return count > 0 if self.loss_is_mean else ops.logical_or(count > 0, seeded_loss == seeded_loss)

    def takes(self, ran, gradients):
        """Whether a micro-batch that ran is added: not if it overflowed and overflows are dropped."""
        takes = self.belongs(ran)
        if self.drops:
            finite = ops.logical_and(all_finite(gradients), ops.isfinite(ran[0]))
            takes = ops.logical_and(takes, finite)
        return takes

    def left_out(self, count):
        """The sums of a micro-batch that counts nothing. A NaN count is added, because it must reach the total."""
        return ops.stack((ops.zeros_like(count), count, ops.zeros_like(count)))

    def rejected(self, ran):
        """The sums of a micro-batch that ran and is not added."""
        sums = self.left_out(ran[1])
        return ops.select(self.belongs(ran), ms.Tensor([0.0, 0.0, 1.0], ms.float32), sums) if self.drops else sums

    def added(self, unit, ran, gradients):
        count = ran[1]
        sums = ops.stack((ran[0], count, ops.zeros_like(count)))
        if self.records_noise:
            sums = ops.depend(sums, self.noise.note(gradients, unit, count))
        return ops.depend(sums, self.store.add(gradients))

    def own_mean(self, parts, sums, scale, unit):
        """This rank's mean of the loss, or of an output of shape (), from its summed parts, without loss scale."""
        count = counts.at_least(ops.unstack(sums)[COUNT], self.min_count)
        return counts.ratio_or_zero(parts, unit * count if self.is_mean else unit)

    def counted(self, sums, total):
        """The count of one batch of several; `total` was counted before the batch ran."""
        return total

    def reduce(self, gradients, sums, scale, unit):
        return self.reduction(gradients, sums, unit, scale)


class ByCountsWithOutputs(ByCounts):
    """Weights micro-batches by given counts, or by counts that the network returns. In the second case the seed per
    item is computed from the batch's samples, and the accumulators hold numbers of the size of one sample's sum."""

    runs_all = True

    def __init__(self, parts: WeighingParts) -> None:
        super().__init__(parts)
        self.ratio = parts.options.returns_ratio
        self.aux = parts.options.aux

    def run_and_add(self, unit, prepared, size, *micro_batch):
        ran, gradients = self.run(unit, prepared, size, self.count_before(micro_batch), *micro_batch)
        part = self.added(unit, ran, gradients) if not self.judges else self.judged(unit, ran, *gradients)
        return self.with_outputs(part, ran) if self.aux else part

    def count_before(self, micro_batch):
        """Zero if the network counts."""
        return ms.Tensor(0.0, ms.float32) if self.ratio else self.counting.of(*micro_batch)

    def run(self, unit, prepared, size, count, *micro_batch):
        """Returns ``(the seeded loss, the count, outputs)`` , and the gradients."""
        seed = unit * count if self.loss_is_mean else unit
        outputs, gradients = self.micro_step.run(seed, prepared, size, *micro_batch)
        if self.ratio:
            return outputs, gradients
        return (outputs[0], count, *outputs[1:]), gradients

    def with_outputs(self, part, ran):
        taken = ops.logical_and(self.belongs(ran), ops.unstack(part)[DROPPED] == 0)
        return (part, *of_taken(ran[2:], taken))

    def counted(self, sums, total):
        return ops.unstack(sums)[COUNT] if self.ratio else total


# -- compiled ----------------------------------------------------------------------------------------------------------


def of_taken(outputs, taken):
    """The outputs of a micro-batch; if it is left out, its scalars are zero."""
    result: tuple = ()
    for index in range(len(outputs)):
        output = outputs[index]
        if output.ndim == 0:
            output = ops.select(taken, output, ops.zeros_like(output))
        result = (*result, output)
    return result
