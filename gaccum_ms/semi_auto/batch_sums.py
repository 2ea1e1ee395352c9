"""The sums of a batch over its micro-batches, in the form that the compiler's passes need.

Backward starts from the first of these numbers, a sum of numerators. The others have no gradient:

    mean or sum         numerators alone                                        (Numerators)
    with a count        their sum, and the whole batch's count                  (Fraction; also a window's samples)
    ratio               their sum, and that of the network's denominators       (Ratio)
    several losses      their weighted sum; each loss's sum; each total         (WeightedLosses)

The accumulated gradient of one loss is divided afterwards. Several losses share one accumulator, so each is divided
before its backward: their totals come first, from the whole batch. Where the network returns them, it is called on the
whole batch, and the compiler removes all of that call but the denominators.

Backward differentiates the forward graph. An operation in it costs the compiler about ten times as much as one outside.
So the forward graph adds up the loss alone. It returns the other numbers of each micro-batch, which have no gradient;
`BatchSums.sums` checks the counts among them, and adds them up.

Backward's seed has a factor, by which the accumulators hold numbers of a mean's size: a multiplication in each
micro-batch would take the compiler longer.

With `aux` , outputs of shape () are such numbers. Those of samples are returned beside the numbers, one for each
micro-batch: joined here, they would be gathered on all devices. A pipeline has none of samples.

A Tensor here is the whole Tensor over all devices: a mean is over all devices, and so is a count.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.accumulation.measure import float32_loss, float32_losses
from gaccum_ms.accumulation.outputs import check_outputs, kinds_and_shapes
from gaccum_ms.backend.parameters import state_parameter
from gaccum_ms.distributed.stages import stages
from gaccum_ms.losses import counts
from gaccum_ms.losses.per_sample_loss import PerSampleLoss
from gaccum_ms.options.rules import Setup
from gaccum_ms.semi_auto import modes as auto_parallel
from gaccum_ms.semi_auto.compiled_once import compiled_once
from gaccum_ms.semi_auto.operators import each, item_of, stack
from gaccum_ms.semi_auto.pipeline import PipelineSlices
from gaccum_ms.semi_auto.shard_slice import ShardSlices

_SMALL = 1e-30  # in the place of a total of zero, whose numerators are zero


class MicroBatches(nn.Cell):
    """Cut all inputs but the shared ones into micro-batches: a tuple for each input."""

    def __init__(self, micro_size: int, shared: tuple[int, ...]) -> None:
        super().__init__(auto_prefix=False)
        self.micro_size = micro_size
        self.is_cut = ops.constexpr(lambda position: position not in shared and micro_size > 1)
        shards = auto_parallel.shards_of_inputs()
        kind = PipelineSlices if stages() > 1 else ShardSlices
        self.slices = nn.CellList([kind(micro_size, number) for number in shards], auto_prefix=False)
        self.one_for_all = len(shards) == 1

    def construct(self, *inputs):
        by_input: tuple = ()
        for position in range(len(inputs)):
            slices = (inputs[position],) * self.micro_size
            if self.is_cut(position):
                slices = self.slices[0 if self.one_for_all else position](inputs[position])
            by_input = (*by_input, slices)
        return by_input


class Numerators(nn.Cell):
    """A loss that is a mean or sum over samples. The losses of a `PerSampleLoss` are added up per sample."""

    may_skip = False  # whether there are batches that must not update
    batch_counts = 0  # how many counts `totals` returns
    counts_micro_batches = False  # whether the last of a micro-batch's numbers is its items

    def __init__(self, setup: Setup) -> None:
        super().__init__(auto_prefix=False)
        options, network, _ = setup
        self.per_sample = isinstance(network, PerSampleLoss) and stages() == 1
        self.network = compiled_once(network.network if self.per_sample else network, setup)
        if self.per_sample:
            self.reducer = network
        self.loss_is_mean = options.loss_is_mean
        self.share = 1.0 / (options.micro_size or 1) if self.loss_is_mean else 1.0
        self.aux = options.aux

    def unit(self, samples: int) -> float:
        """What backward's seed is multiplied by. Python calls it when a graph is compiled, for a batch of so many
        samples."""
        return self.share

    def totals(self, *inputs):
        """The counts of the whole batch, which are known before its micro-batches run."""
        return ()

    def constants(self, *inputs):
        """The counts of the whole batch that its shapes tell."""
        return ()

    def factors(self, totals):
        """What losses are multiplied by before they are added to one another."""
        return ()

    def construct(self, factors, *micro_batch):
        """A micro-batch's part of the loss, its numbers without gradient, and its outputs beside the loss."""
        return self.weighed(micro_batch, 1.0)

    def weighed(self, micro_batch, factor):
        loss = self.network(*micro_batch)
        scalars, outputs = (), ()
        if self.aux:
            check_outputs(loss, False, True, micro_batch[0].shape[0])
            scalars, outputs = beside_loss(loss[1:], factor)
            loss = loss[0]
        loss = ops.cast(loss, ms.float32) if self.per_sample else float32_loss(loss)
        return times(factor, loss), scalars, outputs

    def finished(self, numerators, totals, unit, scale):
        """From the batch's sums: the gradients' divisor, the loss with the outputs of shape (), and whether anything
        was counted."""
        return scale, each(ops.partial(times, self.share), numerators), True


class Fraction(Numerators):
    """A loss that is divided by its items once all are added: the count of the network's inputs."""

    may_skip = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.min_count = setup.options.min_count
        self.window_count = state_parameter("window_count")
        self.count = counts.count_cell(setup.options.counts[0])
        self.counts_samples = setup.options.counts[0] is None and not setup.options.returns_ratio
        self.is_plain_sum = self.counts_samples and not setup.options.loss_is_mean  # which nothing divides
        # In a pipeline the last stage alone could count the batch.
        self.counts_micro_batches = setup.options.returns_ratio or (stages() > 1 and not self.counts_samples)
        self.batch_counts = 0 if self.counts_micro_batches or self.counts_samples else 1
        self.of_one_item: float | None = None

    def unit(self, samples: int) -> float:
        """As large as a mean's factor of one sample. It is the same in all graphs of a step, whose batches may share an
        update."""
        self.of_one_item = self.of_one_item or 1.0 / samples
        return self.of_one_item

    def totals(self, *inputs):
        # Of the batch at once: the micro-batches' counts would be reduced over devices one at a time.
        return (counts.float32_count(self.count(*inputs)),) if self.batch_counts else ()

    def constants(self, *inputs):
        # In the differentiated graph it would take the compiler another round of passes.
        return (self.count(*inputs),) if self.counts_samples else ()

    def construct(self, factors, *micro_batch):
        items = counts.float32_count(self.count(*micro_batch))  # not in the graph of a sum that is counted at once
        items = items if self.counts_samples else counts.nan_if_bad(items)
        loss, scalars, outputs = self.weighed(micro_batch, items if self.loss_is_mean else 1.0)
        return loss, (*scalars, items) if self.counts_micro_batches else scalars, outputs

    def divided(self, numerators, total):
        """The loss and the outputs of shape (), what they were divided by, and whether anything was counted."""
        divisor, counted = counts.divisor_of(total, self.min_count)
        divisor = ops.ones_like(divisor) if self.is_plain_sum else divisor
        return each(ops.partial(counts.quotient_or_zero, counted, divisor), numerators), divisor, counted

    def finished(self, numerators, totals, unit, scale):
        total = ops.depend(totals[0], ops.assign(self.window_count, totals[0]))
        means, divisor, counted = self.divided(numerators, total)
        # If a micro-batch counts nothing, its mean and thus the loss are NaN.
        return divisor * unit * scale, means, ops.logical_and(counted, ops.isfinite(means[0]))


class Ratio(Fraction):
    """The network itself returns a sum, and the number of its items."""

    def construct(self, factors, *micro_batch):
        outputs = self.network(*micro_batch)
        check_outputs(outputs, True, self.aux, micro_batch[0].shape[0])
        scalars, others = beside_loss(outputs[2:], 1.0) if self.aux else ((), ())
        # Zeros that are added to a numerator's gradient would take the compiler another round of passes.
        denominator = ops.stop_gradient(counts.float32_count(outputs[1]))
        return ops.cast(outputs[0], ms.float32), (*scalars, denominator), others


class WeightedSum(nn.Cell):
    """The weighted sum of every second of a network's outputs, or of all.

    It has a backward of its own. The known one adds zeros to the gradient of each item of a tuple: where the network
    has `mindspore.lazy_inline` , they would take the compiler another round of passes.
    """

    def __init__(self, step: int) -> None:
        super().__init__(auto_prefix=False)
        self.step = step

    def construct(self, outputs, factors):
        weighted = as_float32(outputs[0]) * factors[0]
        for term in range(1, len(factors)):
            weighted = weighted + as_float32(outputs[self.step * term]) * factors[term]
        return weighted

    def bprop(self, outputs, factors, out, dout):
        gradients: tuple = ()
        for position in range(len(outputs)):
            gradient = outputs[position]
            if position % self.step == 0:
                gradient = ops.cast(dout * factors[position // self.step], gradient.dtype)
            elif isinstance(gradient, ms.Tensor):  # the compiler puts a 0 in the place of one that is not used above
                gradient = ops.zeros_like(gradient)
            gradients = (*gradients, gradient)
        return gradients, each(ops.zeros_like, factors)


class WeightedLosses(Numerators):
    """Several losses, each over its own total."""

    may_skip = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        options = setup.options
        self.for_totals = setup.network
        self.number = self.batch_counts = options.losses
        self.weighted_sum = WeightedSum(2 if options.returns_ratio else 1)
        self.weights = options.loss_weights
        self.ratio = options.returns_ratio
        self.min_count = options.min_count
        self.least = options.min_count or _SMALL
        self.window_count = state_parameter("window_count", (self.number,))
        self.loss_terms = state_parameter("loss_terms", (self.number,))
        self.counts = nn.CellList([counts.count_cell(count) for count in options.counts], auto_prefix=False)

    def unit(self, samples: int) -> float:
        """Each loss is divided before its backward."""
        return 1.0

    def totals(self, *inputs):
        if self.ratio:
            outputs = self.for_totals(*inputs)
            check_fractions(outputs, self.number)
            return without_gradient(each(counts.float32_count, outputs[1::2]))
        return self.items(inputs)

    def items(self, batch):
        """Each loss's items."""
        items: tuple = ()
        for count in self.counts:
            items = (*items, counts.float32_count(count(*batch)))
        return items

    def factors(self, totals):
        return each(ops.partial(factor_of, self.least), self.weights, totals)

    def construct(self, factors, *micro_batch):
        outputs = self.network(*micro_batch)
        losses = each(as_float32, outputs[::2]) if self.ratio else float32_losses(outputs, self.number)
        if self.loss_is_mean:
            # The batch's count does not tell whether each micro-batch's is valid.
            items = each(counts.nan_if_bad, self.items(micro_batch))
            losses, factors = each(times, losses, items), each(times, factors, items)
        outputs = outputs if isinstance(outputs, tuple) else tuple(outputs)  # the passes know no list
        return self.weighted_sum(outputs, factors), without_gradient(losses), ()

    def finished(self, numerators, totals, unit, scale):
        totals = stack(totals)
        terms = stack(numerators[1:]) / ops.maximum(totals, self.least)
        loss = ops.depend(numerators[0], (ops.assign(self.loss_terms, terms), ops.assign(self.window_count, totals)))
        return scale, (loss,), ops.logical_and(counts.any_counted(totals, self.min_count), ops.isfinite(loss))


def measure_of(setup: Setup, spans_batches: bool) -> nn.Cell:
    """What a micro-batch adds to the sums, by these options. In a window of several batches samples are counted too."""
    options = setup.options
    if options.several_losses:
        return WeightedLosses(setup)
    if options.returns_ratio:
        return Ratio(setup)
    return Fraction(setup) if options.counted or spans_batches else Numerators(setup)


class BatchSums(nn.Cell):
    """The sums of a batch: a Tensor of shape (), or one of all numbers; with `aux` and each micro-batch's outputs."""

    def __init__(self, setup: Setup, spans_batches: bool) -> None:
        super().__init__(auto_prefix=False)
        self.measure = measure_of(setup, spans_batches)
        self.returns_outputs = self.measure.aux and stages() == 1
        self.unit_of = ops.constexpr(self.measure.unit)
        self.micro_size = setup.options.micro_size or 1
        self.micro_batches = MicroBatches(self.micro_size, setup.options.shared)
        # The passes know by them where a micro-batch's forward ends.
        tag = "pipeline_end" if stages() > 1 else "forward_end"
        self.adds = [ops.Add().add_prim_attr(tag, index) for index in range(1, self.micro_size)]

    def construct(self, *inputs):
        totals = self.measure.totals(*inputs)
        factors = self.measure.factors(totals)
        results = each(ops.partial(self.measure, factors), *self.micro_batches(*inputs))
        losses = each(ops.partial(item_of, 0), results)
        loss = losses[0]
        for index in range(1, self.micro_size):
            loss = self.adds[index - 1](loss, losses[index])
        loss = self.measure.reducer.reduce(loss) if self.measure.per_sample else loss
        numbers: tuple = (loss,)
        others = each(ops.partial(item_of, 1), results)
        for kind in range(len(others[0])):
            numbers = (*numbers, *each(ops.partial(item_of, kind), others))
        numbers = (*numbers, *totals)
        # Stacked, because only Tensors with a backward are whole; others are this device's part.
        numbers = stack(numbers) if len(numbers) > 1 else loss
        return (numbers, each(ops.partial(item_of, 2), results)) if self.returns_outputs else numbers

    def sums(self, numbers, inputs):
        """The batch's numerators, the loss first, and its totals of counts, from the numbers that `construct` returned.
        A bad count is NaN."""
        end = len(numbers) - self.measure.batch_counts
        totals = (
            each(counts.nan_if_bad, numbers[end:]) if self.measure.batch_counts else self.measure.constants(*inputs)
        )
        if self.measure.counts_micro_batches:
            end = end - self.micro_size
            totals = (ops.reduce_sum(counts.nan_if_bad(stack(numbers[end:]))),)
        numerators: tuple = (numbers[0],)
        for begin in range(1, end, self.micro_size):
            numerators = (*numerators, ops.reduce_sum(stack(numbers[begin : begin + self.micro_size])))
        return numerators, totals


# -- compiled ----------------------------------------------------------------------------------------------------------


def times(factor, number):
    """No operator for a factor of 1."""
    return number if isinstance(factor, float) and factor == 1.0 else number * factor


def factor_of(least, weight, total):
    return weight / ops.maximum(total, least)


def without_gradient(tensors):
    """One at a time: the passes of auto parallel mode know no StopGradient of a tuple."""
    return each(ops.stop_gradient, tensors)


def beside_loss(outputs, factor):
    """The outputs beside a loss: those of shape (), weighed as the loss is; and all of them."""
    check_outputs_of_stages(kinds_and_shapes(outputs)[1])
    outputs = without_gradient(outputs)
    scalars: tuple = ()
    for output in outputs:
        if output.ndim == 0:
            scalars = (*scalars, times(factor, as_float32(output)))
    return scalars, outputs


@ops.constexpr
def check_outputs_of_stages(shapes):
    if stages() > 1 and any(shape != () for shape in shapes):
        raise ValueError(
            f"For 'GradAccumulationCell', with aux=True in a pipeline each output beside the loss must be a Tensor of "
            f"shape (), because the last stage alone has the outputs, and gives the others its sums, but got shapes "
            f"{shapes}. Reduce them in the network."
        )


@ops.constexpr
def _check_fractions(kinds, shapes, number):
    are_numbers = all(
        shape == () or (position % 2 and type(kind).__name__ in ("Int", "UInt", "Float"))
        for position, (kind, shape) in enumerate(zip(kinds, shapes, strict=True))
    )
    if len(shapes) != 2 * number or not are_numbers:
        raise ValueError(
            f"For 'GradAccumulationCell', with reduction='ratio' the network must return (numerator, denominator) for "
            f"each of {number} losses, all in one tuple, but got {len(shapes)} output(s) of shapes {shapes}. Sum "
            f"numerators and denominators over all axes."
        )


def check_fractions(outputs, number):
    """Refuse what is no numerator and denominator in turn, for each loss."""
    kinds, shapes = kinds_and_shapes(outputs if isinstance(outputs, (tuple, list)) else (outputs,))
    _check_fractions(kinds, shapes, number)


def as_float32(number):
    return ops.cast(number, ms.float32)
