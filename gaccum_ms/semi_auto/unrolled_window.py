"""A window in semi-auto and auto parallel mode, where MindSpore's compiler distributes the graph and accumulates.

Its passes handle one form of graph: the whole batch's loss, in which each micro-batch begins with a slice tagged
``grad_accu_num`` and is added to the others by an Add tagged ``forward_end`` ; one backward of that loss; and
accumulators named ``accu_grads.<weight>``. The passes make each micro-batch's forward wait for the backward before it,
add to the accumulators, and reduce over devices once per weight. They handle no loop, so the graph grows with the
number of micro-batches: `mindspore.lazy_inline` on the network bounds the compile time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms import backend
from gaccum_ms.accumulation.accumulators import GradientSums, NoSums
from gaccum_ms.accumulation.open_window import BATCHES, COUNT, LOSS, OpenWindow
from gaccum_ms.accumulation.saturation import clear_flag, saturates
from gaccum_ms.backend.parameters import expose_records, hold_weights, state_parameter
from gaccum_ms.distributed.stages import owned_weights, stages
from gaccum_ms.options.rules import Setup
from gaccum_ms.semi_auto.batch_sums import BatchSums
from gaccum_ms.semi_auto.operators import each, item_of, reshape, stack, unstack
from gaccum_ms.semi_auto.pipeline import OverStages, own_gradient
from gaccum_ms.splitting.even_split import SplitPlan, plan_split

if TYPE_CHECKING:
    from gaccum_ms.accumulation.update import Update


def cloned(weights: Sequence[ms.Parameter], dtype: ms.Type | None, prefix: str) -> ms.ParameterTuple:
    """Zero accumulators that are clones of their weights, so that the compiler gives them the same layout. They stay
    trainable, or its pass for norms would take each device's part of a gradient for the whole."""
    clones = ms.ParameterTuple(weights).clone(prefix=prefix.removesuffix("."), init="zeros")
    for clone, weight in zip(clones, weights, strict=True):
        clone.set_dtype(dtype or weight.dtype)
    return clones


class UnrolledWindow(nn.Cell):
    """The methods of `Window` and of its ledger, for the compiler's own accumulation. `position` : if windows may have
    several batches, the number of them so far."""

    is_sharded = True
    weighs_samples = False
    adds_bad_batches = True
    micro_batch_size = None  # the number of micro-batches is fixed

    def __init__(self, setup: Setup, weights: ms.ParameterTuple, position: ms.Parameter | None = None) -> None:
        super().__init__(auto_prefix=False)
        self.spans_batches = position is not None
        self.batch_sums = BatchSums(setup, self.spans_batches)
        self.measure = self.batch_sums.measure
        hold_weights(self, weights)
        self.backward = ops.GradOperation(get_by_list=True, sens_param=True)
        self.has_stages = stages() > 1
        if self.has_stages:
            self.over_stages = OverStages()
        self.map = ops.HyperMap()
        self.owned = owned_weights(setup.network, weights)
        self.may_skip = self.needs_division = self.measure.may_skip
        self.has_outputs = self.batch_sums.returns_outputs
        self.micro_size = setup.options.micro_size or 1
        self.shared = setup.options.shared
        self.accumulates = self.micro_size > 1
        self.store = NoSums()
        if self.accumulates:
            self.store = GradientSums(weights, setup.options.accumulators.dtype, False, allocate=cloned)
        # With optimizer parallel, backward returns this device's reduced part; else the accumulators hold it.
        self.optimizer_is_sharded = bool(ms.get_auto_parallel_context("enable_parallel_optimizer"))
        self.notes_gradient = self.may_skip and backend.get_grad_accumulation_shard()
        if self.notes_gradient:
            # The passes of `gradient_accumulation_shard` find no gradient that is used only behind the `if` around the
            # update, so a number of the smallest is written down before it.
            self.noted_gradient = state_parameter("noted_gradient")
            owned = [position for position, is_owned in enumerate(self.owned) if is_owned]
            self.smallest = min(owned, key=lambda position: weights[position].size)
        if self.has_outputs:
            self.zero = state_parameter("zero")
        self.sum_over_devices = ops.AllReduce()
        expose_records(self, self.measure)
        if position is not None:
            self.open = OpenWindow("GradAccumulationCell", self.store, position, setup.options.accumulation_steps)
            if saturates():
                self.saturated_batches = self.open.saturated_batches
            self.batch_weight = state_parameter("batch_weight", value=1.0)  # 0: a flush, which runs a batch again

    @property
    def ledger(self) -> nn.Cell:
        """What the update ends."""
        return self

    # -- compiled ------------------------------------------------------------------------------------------------------

    def run(self, inputs, scale):
        """As `Window.run` ."""
        unit, numerators, totals, outputs, gradients = self.backwards(inputs, scale)
        gradients = self.reduced(gradients)
        divisor, means, counted = self.measure.finished(numerators, totals, unit, scale)
        loss = self.with_noted_gradient(means[0], gradients)
        return (gradients, divisor, loss, counted), self.joined(outputs, means[1:])

    def add_batch(self, inputs):
        """Forward, backward and add for a batch that does not end its window; returns its mean loss, and outputs."""
        _, numerators, totals, outputs, gradients = self.backwards(inputs, self.open.window_unit + 0.0)
        loss, items = numerators[0], totals[0]
        sums = stack((loss, items, ops.zeros_like(loss), ops.ones_like(loss)))  # in the order of open_window.py
        added = ops.assign_add(self.open.window_sums, ops.depend(sums, self.store.read(gradients)))
        added = self.open.with_saturation_noted(ops.depend(added, ops.assign(self.open.batch_items, items)))
        means, _, _ = self.measure.divided(numerators, items)
        return ops.depend(means[0], added), self.joined(outputs, means[1:])

    def end_batches(self, inputs):
        """The same for the window's last batch. Returns what `run` does for the window, its loss, and outputs."""
        weight, scale = self.batch_weight + 0.0, self.open.window_unit + 0.0
        unit, numerators, totals, outputs, gradients = self.backwards(inputs, scale * weight)
        gradients = self.reduced(gradients)
        means, _, _ = self.measure.divided(numerators, totals[0])
        sums = unstack(self.open.window_sums + 0.0)
        loss = ops.depend(means[0], ops.assign(self.open.batch_items, totals[0]))
        loss = ops.depend(loss, ops.assign(self.open.window_batches, sums[BATCHES] + weight))
        numerators = (sums[LOSS] + numerators[0] * weight,)
        totals = (sums[COUNT] + totals[0] * weight,)
        divisor, means_of_window, counted = self.measure.finished(numerators, totals, unit, scale)
        of_window = self.with_noted_gradient(ops.depend(means_of_window[0], loss), gradients)
        return (gradients, divisor, of_window, counted), loss, self.joined(outputs, means[1:])

    def backwards(self, inputs, scale):
        """A batch's unit, numerators, totals and outputs, and what backward returns."""
        unit = self.batch_sums.unit_of(inputs[0].shape[0])
        numbers = self.batch_sums(*inputs)
        outputs = ()
        if self.has_outputs:
            numbers, outputs = numbers
        seed = scale * unit  # of the loss
        if numbers.ndim > 0:
            # The compiler must see the loss's own seed in this stack: else a loss per sample costs one more reduction
            # over devices. It does not look into a constant stack, so one of the zeros is computed.
            seed = stack((seed, ops.zeros_like(seed), *zeros(numbers.shape[0] - 2)))
        if self.has_outputs:  # beside outputs the passes find the loss only if no seed is a constant
            seed = (seed + self.zero, self.map(ops.partial(zeros_of, self.zero + 0.0), outputs))
        gradients = self.backward(self.batch_sums, self.weights)(*inputs, seed)
        if self.has_stages:
            numbers = self.over_stages(numbers, gradients)
        numbers = unstack(numbers) if numbers.ndim > 0 else (numbers,)
        numerators, totals = self.batch_sums.sums(numbers, inputs)
        return unit, numerators, totals, outputs, gradients

    def reduced(self, gradients):
        """The gradients over all devices."""
        if self.accumulates and not self.optimizer_is_sharded:
            gradients = self.store.read(gradients)
        return self.map(own_gradient, gradients, self.owned) if self.has_stages else gradients

    def with_noted_gradient(self, loss, gradients):
        if not self.notes_gradient:
            return loss
        return ops.depend(loss, ops.assign(self.noted_gradient, ops.reduce_sum(gradients[self.smallest])))

    def joined(self, outputs, scalars):
        """The outputs of the batch, of which each device has its own samples."""
        if not self.has_outputs:
            return scalars
        result: tuple = ()
        taken = 0
        for position in range(len(outputs[0])):
            if outputs[0][position].ndim == 0:
                result = (*result, scalars[taken])
                taken = taken + 1
            else:
                of_all = each(ops.partial(item_of, position), outputs)
                result = (*result, ops.concat(of_all, 0) if len(of_all) > 1 else of_all[0])
        return result

    def on_any_rank(self, condition):
        """Whether any device has found `condition` in its parts of the gradients."""
        number = ops.expand_dims(ops.cast(condition, ms.float32), 0)  # in a pipeline a reshape is refused
        return reshape(self.sum_over_devices(number), ()) > 0

    def reset(self, after):
        """Empty the window, once `after` is computed."""
        if self.spans_batches:
            return self.open.reset(after)
        return self.store.reset(after)

    # -- not compiled --------------------------------------------------------------------------------------------------

    def plan_in_python(self, shapes: Sequence[tuple[int, ...]]) -> SplitPlan:
        """Where a batch with inputs of these shapes is cut."""
        return plan_split(shapes, self.micro_size, None, self.shared)

    def reset_eagerly(self) -> None:
        """After a batch failed. The compiler's graph of one batch clears the accumulators at its end."""
        if self.spans_batches:
            self.open.drop_if_torn()


class AddedBatch(nn.Cell):
    """The graph of a batch that does not end its window. It shares all Parameters with the step."""

    def __init__(self, window: UnrolledWindow, update: Update, batch_count: ms.Parameter) -> None:
        super().__init__(auto_prefix=False)
        self.window, self.update, self.batch_count = window, update, batch_count
        self.set_train()

    def construct(self, *inputs):
        loss, outputs = self.window.add_batch(clear_flag(inputs))
        loss = ops.depend(loss, ops.assign_add(self.batch_count, ms.Tensor(1, ms.int32)))
        return self.update.returned(loss, ms.Tensor(False, ms.bool_), self.update.scale(), outputs)


# -- compiled ----------------------------------------------------------------------------------------------------------


@ops.constexpr
def zeros(size):
    """The seeds of what has no gradient."""
    return tuple(ms.Tensor(0.0, ms.float32) for _ in range(size))


def zeros_of(zero, output):
    return ops.broadcast_to(ops.cast(zero, output.dtype), output.shape)
