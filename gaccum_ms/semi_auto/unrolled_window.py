"""A window in semi-auto and auto parallel mode, where MindSpore's compiler distributes the graph and accumulates.

Its passes handle one form of graph: the whole batch's loss, in which each micro-batch begins with a slice tagged
``grad_accu_num`` and is added to the others by an Add tagged ``forward_end`` ; one backward of that loss; and
accumulators named ``accu_grads.<weight>``. The passes make each micro-batch's forward wait for the backward before it,
add to the accumulators, and reduce over devices once per weight. They handle no loop, so the graph grows with the
number of micro-batches: `mindspore.lazy_inline` on the network bounds the compile time.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms import backend
from gaccum_ms.accumulation.accumulators import GradientSums, NoSums
from gaccum_ms.backend.parameters import hold_weights, record, show_records
from gaccum_ms.options.compatibility import Setup
from gaccum_ms.semi_auto.batch_sums import BatchSums, unit_of
from gaccum_ms.splitting.even_split import SplitPlan, plan_split


def cloned(weights: Sequence[ms.Parameter], dtype: ms.Type | None, prefix: str) -> ms.ParameterTuple:
    """Zero accumulators that are clones of their weights, so that the compiler gives them the same layout. They stay
    trainable, or its pass for norms would take each device's part of a gradient for the whole."""
    clones = ms.ParameterTuple(weights).clone(prefix=prefix.removesuffix("."), init="zeros")
    for clone, weight in zip(clones, weights, strict=True):
        clone.set_dtype(dtype or weight.dtype)
    return clones


class UnrolledWindow(nn.Cell):
    """The methods of `Window` , for the compiler's own accumulation.

    Args:
        setup (Setup): The options and the network.
        weights (ParameterTuple): The weights.
    """

    is_sharded = True
    spans_batches = False
    weighs_samples = False
    micro_batch_size = None  # the number of micro-batches is fixed

    def __init__(self, setup: Setup, weights: ms.ParameterTuple) -> None:
        super().__init__(auto_prefix=False)
        self.batch_sums = BatchSums(setup)
        self.parts = self.batch_sums.parts
        hold_weights(self, weights)
        self.backward = ops.GradOperation(get_by_list=True, sens_param=True)
        self.may_skip = self.needs_division = self.parts.may_skip
        self.has_outputs = setup.o.aux
        self.micro_size = setup.o.micro_size or 1
        self.accumulates = self.micro_size > 1
        self.store = NoSums()
        if self.accumulates:
            self.store = GradientSums(weights, setup.o.accumulators.dtype, False, allocate=cloned)
        # With optimizer parallel, backward returns this device's reduced part; else the accumulators hold it.
        self.optimizer_is_sharded = bool(ms.get_auto_parallel_context("enable_parallel_optimizer"))
        self.notes_gradient = self.may_skip and backend.get_grad_accumulation_shard()
        if self.notes_gradient:
            # The passes of `gradient_accumulation_shard` find no gradient that is used only behind the `if` around the
            # update, so a number of the smallest is written down before it.
            self.noted_gradient = record("noted_gradient")
            self.smallest = min(range(len(weights)), key=lambda position: weights[position].size)
        if self.has_outputs:
            self.zero = record("zero")
        self.sum_over_devices = ops.AllReduce()
        show_records(self, self.parts)

    def run(self, inputs, scale):
        """As `Window.run` ."""
        sums = self.batch_sums(*inputs)
        outputs = ()
        if self.has_outputs:
            sums, outputs = sums
        gradients = self.backward(self.batch_sums, self.weights)(*inputs, self.seeds(sums, outputs, scale))
        if self.accumulates and not self.optimizer_is_sharded:
            gradients = self.store.read(gradients)
        numbers = ops.unstack(sums) if sums.ndim > 0 else (sums,)
        divisor, means, counted = self.parts.finished(numbers, unit_of(inputs), scale)
        loss = means[0]
        if self.notes_gradient:
            loss = ops.depend(loss, ops.assign(self.noted_gradient, ops.reduce_sum(gradients[self.smallest])))
        return (gradients, divisor, loss, counted), self.joined(outputs, means[1:])

    def seeds(self, sums, outputs, scale):
        """Of backward, which runs from the first sum."""
        seed = scale
        if sums.ndim > 0:
            seed = ops.stack((scale, *((ops.zeros_like(scale),) * (sums.shape[0] - 1))))
        if not self.has_outputs:
            return seed
        # Beside outputs the passes find the loss only if no seed is a constant.
        seeds: tuple = ()
        for shown in outputs:
            of_micro_batch: tuple = ()
            for one in shown:
                of_micro_batch = (*of_micro_batch, ops.broadcast_to(ops.cast(self.zero + 0.0, one.dtype), one.shape))
            seeds = (*seeds, of_micro_batch)
        return seed + self.zero, seeds

    def joined(self, outputs, scalars):
        """The outputs of the batch, of which each device has its own samples."""
        result: tuple = ()
        taken = 0
        for position in range(len(outputs[0]) if self.has_outputs else 0):
            if outputs[0][position].ndim == 0:
                result = (*result, scalars[taken])
                taken = taken + 1
            else:
                of_all: tuple = ()
                for shown in outputs:
                    of_all = (*of_all, shown[position])
                result = (*result, ops.concat(of_all, 0) if len(of_all) > 1 else of_all[0])
        return result

    def on_any_rank(self, condition):
        """Whether any device has found `condition` in its parts of the gradients."""
        found = ops.reshape(ops.cast(condition, ms.float32), (1,))
        return ops.reshape(self.sum_over_devices(found), ()) > 0

    def reset(self, after):
        """Zero the accumulators, once `after` is computed."""
        return self.store.reset(after)

    def plan_in_python(self, shapes: Sequence[tuple[int, ...]]) -> SplitPlan:
        """Where a batch with inputs of these shapes is cut."""
        return plan_split(shapes, self.micro_size, None)

    def reset_eagerly(self) -> None:
        """Nothing: the compiler's graph clears the accumulators at its end."""
