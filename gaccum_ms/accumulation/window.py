"""A window: its micro-batches run forward and backward one at a time, and their gradients are added up.

A window has four parts; assembly.py combines them:

    micro-step      one loss, several, or two passes for a loss of the whole batch (micro_step.py, grad_cache.py)
    weighing        by samples, by counts, by a count for each loss (weighing.py)
    store           none, or accumulators, compensated or not (accumulators.py)
    lifetime        one batch, or open over several (open_window.py)

In the modes where MindSpore's compiler accumulates, there is no loop: unrolled_window.py has the same methods.

Graph mode parses the methods from `run` on. The loop carries one float32 Tensor, `sums`.

A small network's first call takes as long as graph mode has small functions to infer. A call is one; a constant ``if``
is one if its usual branch comes first and returns, or in an expression, else two; a comprehension is ten for each item,
so `ops.HyperMap` takes its place. tests/training/test_first_call.py counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.accumulation import micro_batches
from gaccum_ms.accumulation.copies import Copies
from gaccum_ms.accumulation.forward_alone import rows_of, shapes_if_taken
from gaccum_ms.accumulation.sums import LOSS, SUMS
from gaccum_ms.backend.parameters import expose_records
from gaccum_ms.layers.batchnorm import trains_batch_norm
from gaccum_ms.options.options import Options
from gaccum_ms.splitting.even_split import cut_axes

if TYPE_CHECKING:
    from gaccum_ms.accumulation.open_window import OpenWindow


class _LeastSamples:
    """The fewest samples of a micro-batch: two if a BatchNorm trains, unless the user's choice forces one. The first
    batch decides, because a layer's mode may change after the step was built. This object is apart from the window: a
    window that held a method of its own would refer to itself, and be freed late."""

    def __init__(self, network: nn.Cell) -> None:
        self._network = network
        self._number: int | None = None
        self._is_open = True  # whether no batch came yet that the user's choice cuts into more than single samples

    def judge(self, size: int) -> None:
        """Take a batch into account, which is cut into micro-batches of `size` samples."""
        if self._is_open:
            self._is_open = size == 1
            self._number = self._needed() if size > 1 else 1

    def read(self) -> int:
        """The number, which a graph has when it is compiled."""
        return self._needed() if self._number is None else self._number  # None: within another graph

    def _needed(self) -> int:
        return 2 if trains_batch_norm(self._network) else 1


class Window(nn.Cell):
    """The loop over micro-batches, and what surrounds it. `open_window` : the state between the batches of a window;
    None: each batch is a window."""

    is_sharded = False  # whether gradients are this device's parts alone

    def __init__(
        self,
        options: Options,
        micro_step: nn.Cell,
        weighing: nn.Cell,
        store: nn.Cell,
        open_window: OpenWindow | None = None,
        copies: Copies | None = None,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.copies = copies or Copies()
        self._begin_copies = ops.constexpr(self.copies.begin, check=False)
        self.micro_size = options.micro_size
        self.shared, self.axis = options.shared, options.axis
        self.micro_batch_size: Any = None if options.finds_size else options.micro_batch_size
        self.micro_step = micro_step
        self._least = _LeastSamples(micro_step.network)
        self.least = ops.constexpr(self._least.read)
        self.weighing = weighing
        self.store = store
        self._check_plan = getattr(micro_step, "check_plan", None)
        self._outputs_are_checked = False
        self.spans_batches = open_window is not None
        if open_window is not None:
            self.open = open_window
        self.may_skip = weighing.may_skip
        self.needs_division = weighing.needs_division
        self.weighs_samples = weighing.weighs_samples
        self.has_outputs = options.aux
        self.records_noise = options.record_noise
        if options.record_noise:
            self.noise = weighing.noise
        expose_records(self, weighing, weighing.noise if options.record_noise else None)

    def __getattr__(self, name: str) -> Any:
        """At each compilation, `weighing_of_first` , `weighing_of_loop` and `weighing_of_rest` : see copies.py."""
        if name.startswith("weighing_of_"):
            return self.copies.of(name, self.weighing)
        return super().__getattr__(name)

    # -- compiled ------------------------------------------------------------------------------------------------------

    def run(self, inputs, scale):
        """Forward, backward and add for a window of one batch. Returns (the gradients, reduced over ranks; their
        divisor; the loss; whether anything was counted), and the outputs beside the loss."""
        plan = self.plan(inputs)
        size = plan[micro_batches.SIZE]
        unit = self.weighing.unit(inputs, plan, scale)
        if plan[micro_batches.WHOLE] and not self.may_skip:
            return self._run_whole(inputs, size, scale, unit)
        sums, outputs = self.accumulate(inputs, plan, scale, unit)
        return self.finish(sums, unit, scale), outputs

    def _run_whole(self, inputs, size, scale, unit):
        """`run` for a batch that is one micro-batch, whose gradients need no accumulators. A method, because the
        compiler looks up a method's attributes before it runs any of it, and `plan` must come first."""
        sums, gradients = self.weighing_of_loop.run(unit, (), size, *inputs)
        outputs = ()
        if self.has_outputs:
            outputs = self.means(sums[1:], sums[0], scale, unit)
            sums = sums[0]
        return self.weighing.reduce(gradients, sums, scale, unit), outputs

    def plan(self, inputs):
        """Where the batch is cut."""
        self._begin_copies()
        size, number = self.micro_batch_size, self.micro_size
        return micro_batches.graph_plan(inputs, number, size, self.shared, self.axis, self.least())

    def finish(self, sums, unit, scale):
        """The end of `run` , after `accumulate` ."""
        return self.weighing.reduce(self.store.read(sums), sums, scale, unit)

    def add_batch(self, inputs, scale):
        """Forward, backward and add for one batch of several; returns its mean loss on this rank, and its outputs."""
        plan = self.plan(inputs)
        total = self.weighing.counting.total(inputs, plan)
        expected = self.weighing.expected(total)
        unit = self.open.begin_batch(scale, expected)
        sums = self.weighing.zero_sums()
        outputs = ()
        if self.weighing.weighs_samples or self.weighing.runs_all:
            sums, outputs = self.accumulate(inputs, plan, scale, unit)
        elif expected >= 0:  # a bad count is NaN here, and its batch is left out
            sums = self.accumulate(inputs, plan, scale, unit)[0]
        ended = self.open.end_batch(sums, self.weighing.counted(sums, total))
        loss = self.weighing.own_mean(ops.unstack(sums)[LOSS], sums, scale, unit)
        return ops.depend(loss, ended), outputs

    def add_micro_batch(self, sums, times, micro_batch, scale):
        """Forward, backward and add for one micro-batch of a batch that Python cuts. `times` : how often the batch is
        expected to have this micro-batch's count; 4.0 for one of four equal ones. `sums` : the batch's sums so far,
        then its items. Returns the new `sums` , the batch's mean loss so far, and the outputs."""
        count = self.weighing.counting.of(*micro_batch)
        expected = self.weighing.count_for_seed(count) * times
        unit = self.open.seed_of_window(scale, expected, self.open.window_steps + 0)
        unit = ops.depend(unit, ops.assign(self.open.window_unit, unit))
        rows = micro_batch[0].shape[0] if micro_batch[0].ndim > 0 else 1
        part = self.weighing_of_loop.run_and_add(unit, (), rows, *micro_batch)
        outputs = ()
        if self.has_outputs:
            outputs = part[1:]
            part = part[0]
        items = self.weighing.counted(part, count).reshape((1,))
        sums = self.open.after_micro_batch(sums + ops.concat((part, items)))
        mean = self.weighing.own_mean(ops.unstack(sums)[LOSS], sums[:SUMS], scale, unit)
        return (sums, mean, *outputs)

    def accumulate(self, inputs, plan, scale, unit):
        """Forward, backward and add for each micro-batch of a batch; returns the batch's sums and outputs."""
        if self.has_outputs:  # no loss of the whole batch, so there is nothing to prepare
            weighings = self.weighing_of_first, self.weighing_of_loop, self.weighing_of_rest
            sums, outputs = micro_batches.add_up_and_join(*weighings, inputs, plan, unit, ())
            return sums, self.means(outputs, sums, scale, unit)
        sums, prepared, inputs = self.micro_step.prepare(self.weighing.zero_sums(), unit, inputs, plan)
        loops = not self.weighing.leaves_out
        if self.weighing.leaves_out:
            sums = self.weighing_of_loop.add_up(sums, inputs, plan, unit, prepared)
        part_of, part_of_last = self.weighing_of_loop.run_and_add, self.weighing_of_rest.run_and_add
        return micro_batches.add_up(part_of, part_of_last, sums, inputs, plan, loops, unit, prepared), ()

    def means(self, outputs, sums, scale, unit):
        """The outputs; those of shape () are divided as this rank's loss is."""
        result: tuple = ()
        for index in range(len(outputs)):
            output = outputs[index]
            if output.ndim == 0:
                output = self.weighing.own_mean(output, sums, scale, unit)
            result = (*result, output)
        return result

    def reset(self, after):
        """Zero the accumulators, once `after` is computed."""
        after = ops.depend(after, self.noise.reset(after)) if self.records_noise else after
        return self.store.reset(after)

    # -- not compiled --------------------------------------------------------------------------------------------------

    @property
    def adds_bad_batches(self) -> bool:
        """Whether the sums of a batch with a bad count are in its window."""
        return self.weighing.runs_all

    def begin_micro_batch(self) -> None:
        """Before Python runs `add_micro_batch` , which plans nothing."""
        self.copies.begin()

    def plan_in_python(self, shapes: Sequence[tuple[int, ...]]) -> micro_batches.SplitPlan:
        """Where a batch with inputs of these shapes is cut."""
        arguments = shapes, self.micro_size, self.micro_batch_size, self.shared, self.axis
        self._least.judge(micro_batches.plan_split(*arguments).size)
        return micro_batches.plan_split(*arguments, self._least.read())

    def cut_into(self, micro_batch_size: int) -> None:
        """Set the number of samples in a micro-batch, for graphs that are not compiled yet."""
        self.micro_batch_size = micro_batch_size

    def check_plan(self, plan: micro_batches.SplitPlan) -> None:
        """Before a batch: check what must be equal on all ranks. A collective, if they share one loss."""
        if self._check_plan is not None:
            self._check_plan(plan)

    def check_outputs(
        self, inputs: Sequence[ms.Tensor], plan: micro_batches.SplitPlan, weights: Sequence[ms.Parameter]
    ) -> None:
        """Before the first batch: check what the network returns beside its loss at another number of samples than a
        micro-batch has, so that none fits by chance."""
        network = getattr(self.micro_step, "network_of_rows", None)
        if network is None or self._outputs_are_checked:
            return
        self._outputs_are_checked = True
        finds_size = self.micro_size is None and self.micro_batch_size is None
        rows = 1 + (2 if finds_size else plan.size)
        part = rows_of(inputs, rows, plan.samples, cut_axes(len(inputs), self.shared, self.axis))
        shapes = shapes_if_taken(network, part, weights)
        if shapes is not None:
            self.micro_step.check_shapes(shapes, rows)

    def reset_eagerly(self) -> None:
        """Outside of a graph, after a batch failed: zero the accumulators. A window of several batches stays as it is
        only if the batch never began."""
        if self.spans_batches:
            self.open.drop_if_torn()
            return
        self.store.reset_eagerly()
        if self.records_noise:
            self.noise.reset_eagerly()
