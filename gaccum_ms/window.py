"""A window: its micro-batches go forward and backward one at a time, and their gradients add up.

Three kinds, by what is known before the loop:

* `SampleWindow`: micro-batches weigh by their samples, constants. Seeds are shares, sums are means.
* `CountedWindow`: weights are counts that the data decide, or micro-batches may be dropped. Seeds are counts; sums are
  divided by the total, which is known after the reduction.
* `MultiLossWindow`: several losses, each with a total of its own. One accumulator cannot be divided by several totals,
  so they are counted, and summed over ranks, before the loop.

Each is compiled: the methods below are parsed by graph mode. What the loop carries is one float32 Tensor, `sums`.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import amp, nn, ops

from gaccum_ms import accumulator, normalize, split
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.parallel import SumOverRanks

_to_float32 = ops.MultitypeFuncGraph("gaccum_ms_to_float32")


@_to_float32.register("Tensor")
def _to_float32_one(gradient):
    return ops.cast(gradient, ms.float32)


@ops.constexpr
def _check_losses(shapes, number):
    if len(shapes) != number:
        raise ValueError(
            f"For 'GradAccumulationCell', the network must return {number} loss(es), by 'count' and 'loss_weights', "
            f"but got {len(shapes)} output(s). Give one entry of 'loss_weights' for each loss, and return losses alone."
        )
    for shape in shapes:
        if shape != ():
            raise ValueError(
                f"For 'GradAccumulationCell', the network must return a scalar loss of shape (), but got shape "
                f"{shape}. Use a loss with reduction='mean', or take the mean in the network."
            )


def record(name: str, shape: tuple[int, ...] = ()) -> ms.Parameter:
    """A Parameter in which the compiled step leaves something for callbacks to read."""
    return ms.Parameter(ops.zeros(shape, ms.float32), name=name, requires_grad=False)


class SampleWindow(nn.Cell):
    """Micro-batches weigh by their samples."""

    gated = False  # whether there are windows that must not update
    divides = False  # whether gradients are sums, to be divided by more than the loss scale

    def __init__(self, cell: GradAccumulationCell, weights: ms.ParameterTuple, grad_reducer: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network = cell.network
        self.weights = weights
        self.grad_reducer = grad_reducer
        self.micro_size = cell.micro_size
        self.micro_batch_size = cell.micro_batch_size
        self.loss_is_mean = cell.reduction == "mean"
        self.map = ops.HyperMap()
        self.backward = ops.value_and_grad(self.seeded_loss, None, weights)
        self.accumulates = cell.accumulates
        self.compensated = cell.compensated and cell.accumulates
        if self.accumulates:
            self.accu_grads = accumulator.allocate(weights, cell.accumulator_dtype)
        if self.compensated:
            self.accu_compensation = accumulator.allocate(weights, ms.float32, accumulator.COMPENSATION_PREFIX)

    # -- compiled: the loop --------------------------------------------------------------------------------------------

    def run(self, inputs, scale):
        """Forward, backward and add for the whole window; returns the gradients, reduced over ranks, what they are to
        be divided by, the loss, and whether there is anything to update with."""
        shapes = [value.shape for value in inputs]
        samples, size, full, rest = split.compiled_plan(shapes, self.micro_size, self.micro_batch_size)
        unit = self.unit(inputs, samples, scale)
        if full == 1 and rest == 0 and not self.gated:
            # Nothing to accumulate over: the gradients need no detour through accumulators.
            sums, gradients = self.backward(unit * self.items(size), *inputs)
            return self.reduce(gradients, sums, scale)
        sums = self.nothing()
        stacked = split.stack_full(inputs, size, full, rest)
        index = ms.Tensor(0, ms.int32)
        while index < full:
            sums = sums + self.micro_step(unit, size, split.take(stacked, index))
            index = index + 1
        if rest > 0:
            sums = sums + self.micro_step(unit, rest, split.take_rest(inputs, full * size))
        return self.reduce(self.accumulated(sums), sums, scale)

    def micro_step(self, unit, size, micro_batch):
        seeded_loss, gradients = self.backward(unit * self.items(size), *micro_batch)
        return ops.depend(seeded_loss, self.add(gradients))

    def seeded_loss(self, seed, *micro_batch):
        """The loss times its seed. Scaling here, in the backward's seed, costs no pass over the gradients, and gives
        each sample the gradient that it has in the whole batch, in low precision too."""
        loss = self.network(*micro_batch)
        if isinstance(loss, tuple):
            _check_losses([one.shape for one in loss], 1)
            loss = loss[0]
        _check_losses([loss.shape], 1)
        return ops.cast(loss, ms.float32) * seed

    # -- compiled: what differs between kinds of windows ---------------------------------------------------------------

    def unit(self, inputs, samples, scale):
        """The seed of a micro-batch of one item."""
        return scale / samples if self.loss_is_mean else scale

    def items(self, count):
        """What the seed of a micro-batch is a multiple of: a loss that is a sum over its items weighs as it is."""
        return count if self.loss_is_mean else 1

    def nothing(self):
        """What the loop's sums begin with."""
        return ms.Tensor(0.0, ms.float32)

    def reduce(self, gradients, sums, scale):
        """See `run`."""
        return self.grad_reducer(gradients), scale, sums / scale, True

    # -- compiled: the accumulators ------------------------------------------------------------------------------------

    def add(self, gradients):
        if self.compensated:
            return self.map(accumulator.add_compensated, self.accu_grads, self.accu_compensation, gradients)
        return self.map(accumulator.add, self.accu_grads, gradients)

    def accumulated(self, after):
        """The sum of the window's gradients, once `after` is there."""
        if self.compensated:
            return self.map(
                accumulator.read_compensated,
                ops.depend(self.accu_grads, after),
                ops.depend(self.accu_compensation, after),
            )
        return ops.depend(self.accu_grads, after)

    def clear(self, after):
        """Zero the accumulators, once `after` is there."""
        if not self.accumulates:
            return after
        cleared = self.map(accumulator.clear, ops.depend(self.accu_grads, after))
        if self.compensated:
            cleared = self.map(accumulator.clear, ops.depend(self.accu_compensation, cleared))
        return ops.depend(after, cleared)


class CountedWindow(SampleWindow):
    """Micro-batches weigh by counts, and may be left out. `sums`: the loss, the count, how many were dropped."""

    gated = True
    divides = True

    def __init__(self, cell: GradAccumulationCell, weights: ms.ParameterTuple, grad_reducer: nn.Cell) -> None:
        super().__init__(cell, weights, grad_reducer)
        self.counts = nn.CellList([normalize.count_cell(count) for count in cell.counts], auto_prefix=False)
        self.counts_samples = all(count is None for count in cell.counts)
        self.drops = cell.overflow == "drop_micro_batch"
        self.sum_over_ranks = SumOverRanks(weights, self.nothing().shape)
        # Without counts of the user's own, ranks mean together what MindSpore's 'gradients_mean' says.
        self.factor = self.sum_over_ranks.summed_ranks() if self.counts_samples else 1.0
        self.window_count = record("window_count", self.count_shape(cell))
        self.dropped_micro_batches = record("dropped_micro_batches")

    @staticmethod
    def count_shape(cell: GradAccumulationCell) -> tuple[int, ...]:
        return ()

    def unit(self, inputs, samples, scale):
        return scale

    def nothing(self):
        return ms.Tensor([0.0, 0.0, 0.0], ms.float32)

    def count(self, term, micro_batch):
        return normalize.valid_or_nan(self.counts[term](*micro_batch))

    def micro_step(self, unit, size, micro_batch):
        count = self.count(0, micro_batch)
        # A mean over nothing is NaN, and so is its gradient: such a micro-batch is not run at all. Not so a NaN count,
        # which must reach the total.
        sums = ops.stack((ops.zeros_like(count), count, ops.zeros_like(count)))
        if count > 0:
            sums = self.counted_step(unit * self.items(count), count, micro_batch)
        return sums

    def counted_step(self, seed, count, micro_batch):
        seeded_loss, gradients = self.backward(seed, *micro_batch)
        sums = ops.stack((seeded_loss, count, ops.zeros_like(count)))
        if self.drops:
            if ops.logical_and(amp.all_finite(gradients), ops.isfinite(seeded_loss)):
                sums = ops.depend(sums, self.add(gradients))
            else:
                sums = ms.Tensor([0.0, 0.0, 1.0], ms.float32)
        else:
            sums = ops.depend(sums, self.add(gradients))
        return sums

    def reduce(self, gradients, sums, scale):
        gradients, over_ranks = self.sum_over_ranks(self.map(_to_float32, gradients), sums)
        total = over_ranks[1]
        # The loss of samples is the rank's own, as without accumulation; that of counted items is all ranks'.
        own = sums if self.counts_samples else over_ranks
        loss = normalize.mean_or_zero(own[0] / scale, own[1])
        loss = ops.depend(loss, ops.assign(self.window_count, total))
        loss = ops.depend(loss, ops.assign(self.dropped_micro_batches, over_ranks[2]))
        return gradients, ops.maximum(total, 1e-30) * scale / self.factor, loss, total > 0


def _float32_losses(losses, number):
    if isinstance(losses, ms.Tensor):
        losses = (losses,)
    _check_losses([loss.shape for loss in losses], number)
    return [ops.cast(loss, ms.float32) for loss in losses]


class _LossAlone(nn.Cell):
    """One of several losses: a graph of its own, which the others' NaN cannot enter."""

    def __init__(self, network: nn.Cell, term: int, loss_weights: tuple[float, ...]) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.term = term
        self.weight = loss_weights[term]
        self.number = len(loss_weights)
        self.place = ms.Tensor([float(other == term) for other in range(self.number)], ms.float32)

    def construct(self, seeds, *micro_batch):
        part = _float32_losses(self.network(*micro_batch), self.number)[self.term] * seeds[self.term]
        return part * self.weight, part * self.place


class MultiLossWindow(CountedWindow):
    """Several losses, each divided by its own total. `sums` holds each loss's part of its mean."""

    divides = False

    def __init__(self, cell: GradAccumulationCell, weights: ms.ParameterTuple, grad_reducer: nn.Cell) -> None:
        self.number = len(cell.loss_weights)
        super().__init__(cell, weights, grad_reducer)
        self.loss_weights = ms.Tensor(cell.loss_weights, ms.float32)
        self.backward = ops.value_and_grad(self.seeded_losses, None, weights, has_aux=True)
        alone = [_LossAlone(cell.network, term, cell.loss_weights) for term in range(self.number)]
        self.backward_of = tuple(ops.value_and_grad(one, None, weights, has_aux=True) for one in alone)
        self.loss_terms = record("loss_terms", (self.number,))

    @staticmethod
    def count_shape(cell: GradAccumulationCell) -> tuple[int, ...]:
        return (len(cell.loss_weights),)

    def unit(self, inputs, samples, scale):
        """One over the total, for each loss: the counts of this batch over all ranks, found before the loop."""
        totals = self.sum_over_ranks.alone(self.count_all(inputs))
        totals = ops.depend(totals, ops.assign(self.window_count, totals))
        return normalize.mean_or_zero(scale * self.factor * ops.ones_like(totals), totals)

    def nothing(self):
        return ops.zeros((self.number,), ms.float32)

    def count_all(self, micro_batch):
        return ops.stack([self.count(term, micro_batch) for term in range(self.number)])

    def micro_step(self, unit, size, micro_batch):
        counts = self.count_all(micro_batch)
        seeds = unit * self.items(counts)
        sums = self.nothing()
        if (counts > 0).all():
            (_, sums), gradients = self.backward(seeds, *micro_batch)
            sums = ops.depend(sums, self.add(gradients))
        else:
            # A mean over nothing is NaN, and a zero seed times NaN is NaN: each loss that has items goes back alone.
            for term in range(self.number):
                if counts[term] > 0:
                    (_, part), gradients = self.backward_of[term](seeds, *micro_batch)
                    sums = sums + ops.depend(part, self.add(gradients))
        return sums

    def seeded_losses(self, seeds, *micro_batch):
        """The sum that goes backward, and each loss's part of its window mean."""
        parts = ops.stack(_float32_losses(self.network(*micro_batch), self.number)) * seeds
        return ops.reduce_sum(parts * self.loss_weights), parts

    def reduce(self, gradients, sums, scale):
        gradients, over_ranks = self.sum_over_ranks(self.map(_to_float32, gradients), sums)
        terms = over_ranks / (scale * self.factor)
        loss = ops.reduce_sum(terms * self.loss_weights)
        loss = ops.depend(loss, ops.assign(self.loss_terms, terms))
        total = ops.depend(self.window_count, loss)
        return gradients, scale, loss, ops.logical_and((total >= 0).all(), (total > 0).any())
