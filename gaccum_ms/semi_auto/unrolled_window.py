"""A window in semi-auto and auto parallel mode, where MindSpore's compiler distributes the graph and accumulates.

Its passes handle one form of graph: the whole batch's loss, in which each micro-batch begins with a slice tagged
``grad_accu_num`` and is added to the others by an Add tagged ``forward_end`` ; one backward of that loss; and
accumulators named ``accu_grads.<weight>``. The passes make each micro-batch's forward wait for the backward before it,
add to the accumulators, and reduce over devices once per weight. They handle no loop, so the graph grows with the
number of micro-batches: `mindspore.lazy_inline` on the network bounds the compile time.

A Tensor here is the whole Tensor over all devices: a mean is over all devices, and so is a count.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.accumulation.accumulators import GradientSums, NoSums
from gaccum_ms.accumulation.micro_step import float32_loss
from gaccum_ms.backend.parameters import hold_weights, record
from gaccum_ms.losses import counts
from gaccum_ms.losses.per_sample_loss import PerSampleLoss
from gaccum_ms.options.compatibility import Setup
from gaccum_ms.semi_auto import modes as auto_parallel
from gaccum_ms.semi_auto.shard_slice import ShardSlice
from gaccum_ms.splitting.even_split import SplitPlan, plan_split


def cloned(weights: Sequence[ms.Parameter], dtype: ms.Type | None, prefix: str) -> ms.ParameterTuple:
    """Zero accumulators that are clones of their weights, so that the compiler gives them the same layout. They stay
    trainable, or its pass for norms would take each device's part of a gradient for the whole."""
    clones = ms.ParameterTuple(weights).clone(prefix=prefix.removesuffix("."), init="zeros")
    for clone, weight in zip(clones, weights, strict=True):
        clone.set_dtype(dtype or weight.dtype)
    return clones


class _Slices(nn.Cell):
    """Cut one micro-batch out of all inputs."""

    def __init__(self, index: int, micro_size: int) -> None:
        super().__init__(auto_prefix=False)
        parts = auto_parallel.parts_of_inputs()
        self.slices = nn.CellList([ShardSlice(index, micro_size, one) for one in parts], auto_prefix=False)
        self.one_for_all = len(parts) == 1

    def construct(self, *inputs):
        cut = []
        for position in range(len(inputs)):
            cut.append(self.slices[0 if self.one_for_all else position](inputs[position]))
        return cut


class BatchLoss(nn.Cell):
    """The loss of a whole batch: the sum of its micro-batches' losses, weighted by shares. With counts, also their
    total. The losses of a `PerSampleLoss` are added up per sample, and reduced once.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(auto_prefix=False)
        options, network, _ = setup
        self.per_sample = isinstance(network, PerSampleLoss)
        self.network = network.network if self.per_sample else network
        self.reducer = network if self.per_sample else nn.Identity()
        self.micro_size = options.micro_size or 1
        self.loss_is_mean = options.loss_is_mean
        self.counted = options.counted
        self.min_count = options.min_count
        self.count = counts.count_cell(options.counts[0])
        self.slices = nn.CellList([_Slices(i, self.micro_size) for i in range(self.micro_size)], auto_prefix=False)
        self.adds = [ops.Add().add_prim_attr("forward_end", i) for i in range(1, self.micro_size)]

    def construct(self, *inputs):
        total = self.total(*inputs)
        if self.micro_size == 1:
            return self.result(self.share(inputs, total), total)
        batch_loss = None
        for index in range(self.micro_size):
            share = self.share(self.slices[index](*inputs), total)
            batch_loss = share if batch_loss is None else self.adds[index - 1](batch_loss, share)
        return self.result(batch_loss, total)

    def share(self, micro_batch, total):
        """The part of the batch's loss from one micro-batch."""
        loss = self.network(*micro_batch)
        loss = ops.cast(loss, ms.float32) if self.per_sample else float32_loss(loss)
        if not self.counted:
            return loss * (1.0 / self.micro_size) if self.loss_is_mean else loss
        count = counts.valid_or_nan(self.count(*micro_batch)) if self.loss_is_mean else 1.0
        return loss * (count / ops.maximum(total, self.min_count or 1e-30))

    def result(self, losses, total):
        loss = self.reducer.reduce(losses) if self.per_sample else losses
        # Stacked, because only Tensors with a backward are whole; others are this device's part.
        return ops.stack((loss, total)) if self.counted else loss

    def total(self, *inputs):
        """The count of the batch, taken at once: a micro-batch's count would wait for the backward before it."""
        if not self.counted:
            return ops.ones((), ms.float32)
        return counts.valid_or_nan(self.count(*inputs))


class UnrolledWindow(nn.Cell):
    """The methods of `Window` , for the compiler's own accumulation.

    Args:
        setup (Setup): The options and the network.
        weights (ParameterTuple): The weights.
    """

    needs_division = False
    is_sharded = True
    spans_batches = False
    has_outputs = False
    weighs_samples = False
    micro_batch_size = None  # the number of micro-batches is fixed

    def __init__(self, setup: Setup, weights: ms.ParameterTuple) -> None:
        super().__init__(auto_prefix=False)
        options = setup.options
        self.batch_loss = BatchLoss(setup)
        hold_weights(self, weights)
        self.backward = ops.GradOperation(get_by_list=True, sens_param=True)
        self.may_skip = options.counted
        self.accumulates = self.batch_loss.micro_size > 1
        self.store = NoSums()
        if self.accumulates:
            self.store = GradientSums(weights, options.accumulators.dtype, False, allocate=cloned)
        # With optimizer parallel, backward returns this device's reduced part; else the accumulators hold it.
        self.optimizer_is_sharded = bool(ms.get_auto_parallel_context("enable_parallel_optimizer"))
        self.sum_over_devices = ops.AllReduce()
        if self.may_skip:
            self.window_count = record("window_count")

    def run(self, inputs, scale):
        """As `Window.run` ; there are no outputs."""
        result = self.batch_loss(*inputs)
        seed = ops.stack((scale, ops.zeros_like(scale))) if self.may_skip else scale
        gradients = self.backward(self.batch_loss, self.weights)(*inputs, seed)
        if self.accumulates and not self.optimizer_is_sharded:
            gradients = self.store.read(gradients)
        if not self.may_skip:
            return (gradients, scale, result, True), ()
        loss, total = ops.unstack(result)
        loss = ops.depend(loss, ops.assign(self.window_count, total))
        # If a micro-batch counts nothing, its mean and thus the loss are NaN.
        counted = total >= 0 if self.batch_loss.min_count else total > 0
        return (gradients, scale, loss, ops.logical_and(counted, ops.isfinite(loss))), ()

    def on_any_rank(self, condition):
        """Whether any device has found `condition` in its parts of the gradients."""
        found = ops.reshape(ops.cast(condition, ms.float32), (1,))
        return ops.reshape(self.sum_over_devices(found), ()) > 0

    def reset(self, after):
        """Zero the accumulators, once `after` is computed."""
        return self.store.reset(after)

    def plan_in_python(self, shapes: Sequence[tuple[int, ...]]) -> SplitPlan:
        """Where a batch with inputs of these shapes is cut."""
        return plan_split(shapes, self.batch_loss.micro_size, None)

    def reset_eagerly(self) -> None:
        """Nothing: the compiler's graph clears the accumulators at its end."""
