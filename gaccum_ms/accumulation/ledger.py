"""The ledger of a window: which micro-batches it adds, with what weight, and what it divides them by.

    unit = begin(scale, items)                      the seed of one item, fixed when the window begins
    row = added(unit, numerators, items, gradients) a micro-batch: its gradients are in the store, its row is returned
    sums = sums + row                               of all micro-batches of a batch
    end(sums, items)                                a batch of a window that stays open
    close(gradients, sums, unit, scale)             over ranks, once; returns what the update takes

Gradients and numerators are multiples of the unit. There are two divisions:

    KnownShares         The total is known when the window begins: the samples of one batch, which are a constant of the
                        graph, or the counts of several losses, which are reduced first. The unit is the loss scale over
                        the total. So seeds are shares, and nothing but the scale is left to divide by.
    DividedAfterwards   Counts, ratios, windows of several batches, dropped micro-batches: the total is known at the
                        end. The unit is of the right size only, and the sums are divided by unit * total.

A micro-batch is left out in two places. One that `may_not_run` is judged by its items: a mean over no items is NaN, and
so is its gradient. One that is judged when it ran (`judges` ) is left out if it overflowed and overflows are dropped,
or if it is a mean over no items that outputs are wanted of. A sum over no items is a number, and belongs in; NaN there
is a mean over no items that was multiplied by their number.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.accumulation.noise import SUMS as NOISE_SUMS
from gaccum_ms.accumulation.noise import NoiseRecord
from gaccum_ms.accumulation.open_window import COUNT, DROPPED, LOSS, SUMS, OpenWindow
from gaccum_ms.accumulation.saturation import saturates
from gaccum_ms.backend.parameters import state_parameter
from gaccum_ms.cpu.kernels import all_finite
from gaccum_ms.distributed.ranks import SumOverRanks
from gaccum_ms.losses import counts
from gaccum_ms.options.options import Options
from gaccum_ms.record.run_record import RULES
from gaccum_ms.transforms.norms import scale_by

BATCHES, SAMPLES, COUNTS, TOTALS = (RULES.index(rule) for rule in ("batches", "samples", "counts", "sums"))


class Ledger(nn.Cell):
    """What both kinds have. `noise` : records the norms of micro-batches, if that is wanted."""

    is_sharded = False  # whether gradients are this device's parts alone
    may_skip = True  # whether a window may have to make no update
    needs_division = True  # by more than the loss scale
    spans_batches = False
    by_samples = True
    # Whether a micro-batch may be left out: `may_not_run` , which is judged before it runs; `judges` , after it ran.
    may_not_run = judges = leaves_out = False
    terms = 0  # losses that may have to run alone

    def __init__(self, store: nn.Cell, noise: NoiseRecord | None) -> None:
        super().__init__(auto_prefix=False)
        self.store = store
        self.records_noise = noise is not None
        if noise is not None:
            self.noise, self.noise_sums = noise, noise.noise_sums

    # -- compiled ------------------------------------------------------------------------------------------------------

    def row(self, numerators, items):
        return numerators

    def noted(self, unit, numerators, items, gradients):
        """The row of a micro-batch, whose norm is recorded."""
        row = self.row(numerators, items)
        if not self.records_noise:
            return row
        return ops.depend(row, self.noise.note(gradients, unit, counts.float32(items)))

    def added(self, unit, numerators, items, gradients):
        """Add a micro-batch; returns its row."""
        return ops.depend(self.noted(unit, numerators, items, gradients), self.store.add(gradients))

    def outputs_of(self, outputs, row, belongs):
        """The outputs of a micro-batch that may be left out."""
        return outputs

    def reset(self, after):
        """Empty the window, once `after` is computed."""
        if self.spans_batches:
            return self.open.reset(after)
        after = ops.depend(after, self.noise.reset(after)) if self.records_noise else after
        return self.store.reset(after)

    # -- not compiled --------------------------------------------------------------------------------------------------

    def reset_eagerly(self) -> None:
        """After a batch failed, empty the window outside of a graph. One of several batches stays as it is if the batch
        never began."""
        if self.spans_batches:
            self.open.drop_if_torn()
            return
        self.store.reset_eagerly()
        if self.records_noise:
            self.noise.reset_eagerly()


class DividedAfterwards(Ledger):
    """The window whose total is known at its end. `sums` : the loss, the count, dropped micro-batches, and of an open
    window its batches.

    `by_samples` : the items are samples, and not the user's own; MindSpore's ``gradients_mean`` then decides between
    mean and sum over ranks, and each rank reports its own loss, as without accumulation. `open_window` : if windows
    have several batches. `rule` : what the batches of a loop weigh by."""

    def __init__(
        self,
        options: Options,
        weights: ms.ParameterTuple,
        store: nn.Cell,
        open_window: OpenWindow | None = None,
        *,
        by_samples: bool = False,
        rule: ms.Parameter | None = None,
    ) -> None:
        number_of_sums = SUMS + (open_window is not None)  # of an open window its batches too
        sum_over_ranks = SumOverRanks(weights, (number_of_sums + NOISE_SUMS * options.record_noise,))
        factor = sum_over_ranks.summed_ranks() if by_samples else 1.0
        super().__init__(store, NoiseRecord(None, factor) if options.record_noise else None)
        self.by_samples = by_samples
        self.loss_is_mean = options.loss_is_mean
        self.drops = options.drops
        self.min_count = options.min_count
        runs_all = by_samples or options.returns_ratio or options.aux or self.drops  # also without items
        self.may_not_run = self.loss_is_mean and not runs_all
        self.judges = self.drops or not (by_samples or self.may_not_run)
        self.leaves_out = self.may_not_run or self.judges
        # A loss that is a sum without a count has no divisor.
        self.divides = self.loss_is_mean or not by_samples
        self.map = ops.HyperMap()
        self.number_of_sums = number_of_sums
        self.spans_batches = open_window is not None
        if open_window is not None:
            self.open = open_window
            if self.records_noise:
                open_window.take_noise(self.noise)
            if saturates():
                self.saturated_batches = open_window.saturated_batches
        self.sum_over_ranks, self.factor = sum_over_ranks, factor
        self.ranks, self.summed_ranks = sum_over_ranks.ranks, sum_over_ranks.summed_ranks()
        self.has_rule = rule is not None
        if rule is not None:
            self.rule = rule
        self.window_count = state_parameter("window_count")
        self.dropped_micro_batches = state_parameter("dropped_micro_batches")

    # -- compiled ------------------------------------------------------------------------------------------------------

    def begin(self, scale, items):
        """The unit: the loss scale over the total that this rank expects. Gradients and accumulators are then as small
        as the whole batch's, and overflow no earlier in low precision."""
        if not self.spans_batches:
            return scale / counts.divisor_of(items, None)[0]
        return self.open.begin_batch(scale, self.expected(items))

    def expected(self, items):
        """The items that the unit can be computed from, if anything is added with them."""
        return items if self.loss_is_mean else counts.one_if_zero(items)

    def zero_sums(self):
        return ms.Tensor([0.0, 0.0, 0.0], ms.float32)

    def row(self, numerator, items):
        return ops.stack((numerator, items, ops.zeros_like(items)))

    def belongs(self, numerator, items):
        """Whether a micro-batch belongs to the window: of a mean, before it runs, by its items."""
        return items > 0 if self.loss_is_mean else ops.logical_or(items > 0, numerator == numerator)

    def takes(self, belongs, numerator, gradients):
        """Whether a micro-batch is added and, if it `may_not_run` , whether it runs."""
        if not self.drops:
            return belongs
        return ops.logical_and(belongs, ops.logical_and(all_finite(gradients), ops.isfinite(numerator)))

    def left_out(self, belongs, items):
        """The row of a micro-batch that is not added. A NaN count is in it, because it must reach the total."""
        row = self.row(ops.zeros_like(items), items)
        return ops.select(belongs, ms.Tensor([0.0, 0.0, 1.0], ms.float32), row) if self.drops else row

    def weighed(self, gradients, weight):
        """Given gradients, times what the window weighs them with."""
        return self.map(ops.partial(scale_by, weight), gradients)

    def enter(self, unit, numerator, items, gradients):
        """Add a batch whose gradients are given, unless it is left out, as with a bad count; returns its row."""
        belongs = ops.logical_and(items >= 0, self.belongs(numerator, items))
        row = ops.select(items >= 0, self.left_out(belongs, items), self.zero_sums())
        # Not of gradients as they were given: beside transforms, MindSpore compiles no check of a graph's inputs.
        if self.takes(belongs, numerator, gradients):
            row = self.added(unit, numerator, items, gradients)
        return row

    def outputs_of(self, outputs, row, belongs):
        """The outputs of a micro-batch; if it is left out, its scalars are zero."""
        taken = ops.logical_and(belongs, ops.unstack(row)[DROPPED] == 0)
        result: tuple = ()
        for index in range(len(outputs)):
            output = outputs[index]
            if output.ndim == 0:
                output = ops.select(taken, output, ops.zeros_like(output))
            result = (*result, output)
        return result

    def own_mean(self, numerator, sums, unit, scale):
        """This rank's mean of the loss, or of an output of shape (), from its numerator, without loss scale."""
        count = counts.at_least(ops.unstack(sums)[COUNT], self.min_count)
        return counts.ratio_or_zero(numerator, unit * count if self.divides else unit)

    def end(self, sums, items):
        """End a batch of a window that stays open. `items` : its count, NaN if it was bad."""
        return self.open.end_batch(sums, items)

    def result(self, scale, after):
        """`close` of a window that stayed open, once `after` is computed."""
        sums = self.open.sums_of_window(after)
        return self.close(self.store.read(sums), sums, self.open.window_unit + 0.0, scale)

    def close(self, gradients, sums, unit, scale):
        """The end of a window: reduce gradients and sums over ranks. Gradients and loss are multiples of `unit` , this
        rank's own. Returns the gradients' sums times the loss scale, their divisor, the loss, and whether there is
        anything to divide by."""
        gradients, sums, over_ranks = self.reduced(gradients, sums, counts.ratio_or_zero(scale, unit))
        loss, divisor, counted = self.divided(sums, over_ranks, scale)
        return gradients, divisor, loss, counted

    def reduced(self, gradients, sums, rescale):
        """Gradients and sums over ranks, and this rank's sums, times the loss scale in the place of the unit. `rescale`
        is zero if this rank has counted nothing: it then has no unit."""
        sums = sums * ops.concat((rescale.reshape((1,)), ops.ones((self.number_of_sums - 1,), ms.float32)))
        if self.records_noise:
            sums = ops.concat((sums, ops.depend(self.noise.window_squares, sums) + 0.0))
        gradients = self.map(ops.partial(scale_by, rescale), gradients)
        gradients, over_ranks = self.sum_over_ranks(gradients, sums)
        return gradients, sums, over_ranks

    def divided(self, sums, over_ranks, scale):
        """The loss, the gradients' divisor, and whether there is anything to divide by."""
        all_sums = ops.unstack(over_ranks[:SUMS])
        total, dropped = all_sums[COUNT], all_sums[DROPPED]
        items, counted = counts.divisor_of(total, self.min_count)
        if self.spans_batches and self.min_count is not None:
            # A window of no items is an update, but not the flush of a window that no rank has begun: of no batches.
            counted = ops.logical_and(counted, ops.unstack(over_ranks)[SUMS] > 0)
        reported = ops.unstack((sums if self.by_samples else over_ranks)[:SUMS])
        count = counts.at_least(reported[COUNT], self.min_count)
        divisor = items * scale / self.factor
        if not self.divides:
            count = ops.ones_like(count)
            divisor = scale * self.ranks / self.factor
        if self.has_rule:
            count, divisor = self.by_rule(count, divisor, scale)
        loss = counts.ratio_or_zero(reported[LOSS] / scale, count)
        loss = ops.depend(loss, ops.assign(self.window_count, total))
        loss = ops.depend(loss, ops.assign(self.dropped_micro_batches, dropped))
        if self.records_noise:
            # A sum that is divided by more than its items is no mean, from which no noise is known.
            of_mean = ops.select(items > total, ops.zeros_like(total), total)
            loss = ops.depend(loss, self.noise.keep(over_ranks[self.number_of_sums :], of_mean))
        return loss, divisor, counted

    def by_rule(self, count, divisor, scale):
        """The divisors of a loop's loss and gradients. Without counts, and with ``gradients_mean=False`` , ranks are
        summed: the mean times the number of ranks. A sum without counts is divided by nothing. The window's end
        decides, as in the step: the window may have begun on another number of ranks."""
        if self.summed_ranks != 1.0:
            divisor = ops.select(self.rule == COUNTS, divisor, divisor / self.summed_ranks)
        if not self.loss_is_mean:
            is_sum = self.rule == TOTALS
            divisor = ops.select(is_sum, scale * (self.ranks / self.summed_ranks), divisor)
            count = ops.select(is_sum, ops.ones_like(count), count)
        return count, divisor


class KnownShares(Ledger):
    """The window of one batch whose samples are its items. `sums` : the loss. A loss that is not a mean over samples
    has weight 1."""

    may_skip = False
    needs_division = False

    def __init__(self, options: Options, store: nn.Cell, grad_reducer: nn.Cell, loss_is_mean: bool) -> None:
        super().__init__(store, NoiseRecord(grad_reducer) if options.record_noise else None)
        self.grad_reducer = grad_reducer
        self.loss_is_mean = loss_is_mean

    # -- compiled ------------------------------------------------------------------------------------------------------

    def begin(self, scale, items):
        return scale / items if self.loss_is_mean else scale

    def zero_sums(self):
        return ms.Tensor(0.0, ms.float32)

    def own_mean(self, numerator, sums, unit, scale):
        return numerator / scale

    def close(self, gradients, sums, unit, scale):
        loss = sums / scale
        if not self.records_noise:
            return self.grad_reducer(gradients), scale, loss, True
        gradients, recorded = self.noise.reduce(self.grad_reducer, gradients, unit / scale, loss)
        return gradients, scale, ops.depend(loss, recorded), True


class SharesOfLosses(KnownShares):
    """Several losses, each divided by its own total. `sums` : each loss's part of its mean.

    One accumulator cannot be divided by several totals, and one for each loss would cost a backward for each. So the
    totals come first. A micro-batch in which a loss has no items runs each of the others alone: zero times NaN is
    NaN."""

    may_skip = True

    def __init__(self, options: Options, store: nn.Cell, grad_reducer: nn.Cell, weights: ms.ParameterTuple) -> None:
        super().__init__(options, store, grad_reducer, options.loss_is_mean)
        self.by_samples = options.own_count is None
        self.leaves_out = not self.by_samples
        self.may_not_run = self.leaves_out and self.loss_is_mean
        self.judges = self.leaves_out and not self.loss_is_mean
        self.number = options.losses
        self.terms = self.number if self.leaves_out else 0
        self.min_count = options.min_count
        self.loss_weights = ms.Tensor(options.loss_weights, ms.float32)
        self.sum_over_ranks = SumOverRanks(weights, (self.number,))
        self.window_count = state_parameter("window_count", (self.number,))
        self.loss_terms = state_parameter("loss_terms", (self.number,))

    # -- compiled ------------------------------------------------------------------------------------------------------

    def begin(self, scale, items):
        """The loss scale over the total, for each loss. If all items are samples, they need no reduction, and
        ``gradients_mean`` decides between mean and sum over ranks."""
        totals = items if self.by_samples else self.sum_over_ranks.alone(items)
        totals = ops.depend(totals, ops.assign(self.window_count, totals))
        return counts.ratio_or_zero(scale * ops.ones_like(totals), counts.at_least(totals, self.min_count))

    def zero_sums(self):
        return ops.zeros((self.number,), ms.float32)

    def belongs(self, numerators, items):
        """Which of the losses belong to the window."""
        return items > 0 if self.loss_is_mean else ops.logical_or(items > 0, numerators == numerators)

    def takes(self, belongs, numerators, gradients):
        return belongs.all()

    def runs_alone(self, term, belongs):
        """Whether a loss runs alone, because another has no items."""
        return ops.logical_and(ops.unstack(belongs)[term], ops.logical_not(belongs.all()))

    def left_out(self, belongs, items):
        return self.zero_sums()

    def close(self, gradients, sums, unit, scale):
        if self.by_samples:
            gradients = self.grad_reducer(gradients)
        else:
            gradients, sums = self.sum_over_ranks(gradients, sums)
        terms = sums / scale
        loss = ops.reduce_sum(terms * self.loss_weights)
        loss = ops.depend(loss, ops.assign(self.loss_terms, terms))
        return gradients, scale, loss, counts.any_counted(ops.depend(self.window_count, loss) + 0.0, self.min_count)
