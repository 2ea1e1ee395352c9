"""A window: its micro-batches run forward and backward one at a time, and their gradients are added up.

    window.py           the loop over the micro-batches of a batch
    measure.py          one micro-batch: forward and backward                       (or grad_cache.py: two passes)
    ledger.py           what is added, with what weight, and what it is divided by
    accumulators.py     where gradients add up
    open_window.py      what is kept between the batches of a window of several

In the modes where MindSpore's compiler accumulates, there is no loop: unrolled_window.py has the same methods.

Graph mode parses the methods from `run` on. The loop carries one float32 Tensor, `sums` ; with outputs, these too.

A small network's first call takes as long as graph mode has small functions to infer. A call is one; a constant ``if``
is one if its usual branch comes first and returns, or in an expression, else two; a comprehension is ten for each item,
so `ops.HyperMap` takes its place. tests/training/test_first_call.py counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from gaccum_ms.accumulation.copies import Copies
from gaccum_ms.accumulation.open_window import COUNT, LOSS, SUMS
from gaccum_ms.backend.parameters import expose_records
from gaccum_ms.backend.without_effect import shapes_if_taken
from gaccum_ms.layers.batchnorm import trains_batch_norm
from gaccum_ms.options.options import Options
from gaccum_ms.splitting import micro_batches
from gaccum_ms.splitting.even_split import cut_axes, rows_of

if TYPE_CHECKING:
    from gaccum_ms.accumulation.ledger import Ledger


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
    """The loop over micro-batches, and what surrounds it."""

    def __init__(self, options: Options, measure: nn.Cell, ledger: Ledger) -> None:
        super().__init__(auto_prefix=False)
        self.copies = Copies()
        self._begin_copies = ops.constexpr(self.copies.begin, check=False)
        self.micro_size = options.micro_size
        self.shared, self.axis = options.shared, options.axis
        self.micro_batch_size: Any = None if options.finds_size else options.micro_batch_size
        self.measure = measure
        self._least = _LeastSamples(measure.network)
        self.least = ops.constexpr(self._least.read)
        self.ledger = ledger
        self.store = ledger.store
        self._outputs_are_checked = False
        self.spans_batches = ledger.spans_batches
        if ledger.spans_batches:
            self.open = ledger.open
        self.weighs_samples = ledger.by_samples and ledger.needs_division
        self.ratio = options.returns_ratio
        # Whether the sums of a batch with a bad count are in its window.
        self.adds_bad_batches = options.returns_ratio or options.aux
        self.has_outputs = options.aux
        expose_records(self, ledger)

    def __getattr__(self, name: str) -> Any:
        """At each compilation, `measure_of_first` , `measure_of_loop` and `measure_of_rest` : see copies.py."""
        if name.startswith("measure_of_"):
            return self.copies.of(name, self.measure)
        return super().__getattr__(name)

    # -- compiled ------------------------------------------------------------------------------------------------------

    def run(self, inputs, scale):
        """A window of one batch. Returns (the gradients, reduced over ranks; their divisor; the loss; whether anything
        was counted), and the outputs beside the loss."""
        plan = self.plan(inputs)
        unit = self.ledger.begin(scale, self.measure.total(inputs, plan))
        if plan[micro_batches.WHOLE] and not self.ledger.may_skip:
            return self.run_whole(inputs, plan, scale, unit)
        sums, outputs = self.add_up(inputs, plan, scale, unit)
        return self.ledger.close(self.store.read(sums), sums, unit, scale), outputs

    def plan(self, inputs):
        """Where the batch is cut."""
        self._begin_copies()
        size, number = self.micro_batch_size, self.micro_size
        return micro_batches.graph_plan(inputs, number, size, self.shared, self.axis, self.least())

    def run_whole(self, inputs, plan, scale, unit):
        """`run` for a batch that is one micro-batch, whose gradients need no accumulators. A method, because the
        compiler looks up a method's attributes before it runs any of it, and `plan` must come first."""
        size = plan[micro_batches.SIZE]
        numerators, items, outputs, gradients = self.measure_of_loop.run(unit, (), size, size, *inputs)
        sums = self.ledger.noted(unit, numerators, items, gradients)
        return self.ledger.close(gradients, sums, unit, scale), self.means(outputs, sums, scale, unit)

    def add_batch(self, inputs, scale):
        """One batch of several; returns its mean loss on this rank, and its outputs."""
        plan = self.plan(inputs)
        items = self.measure.total(inputs, plan)
        unit = self.ledger.begin(scale, items)
        sums = self.ledger.zero_sums()
        outputs = ()
        if self.ledger.by_samples or self.adds_bad_batches:
            sums, outputs = self.add_up(inputs, plan, scale, unit)
        elif items >= 0:  # a bad count is NaN here, and its batch is left out
            sums = self.add_up(inputs, plan, scale, unit)[0]
        ended = self.ledger.end(sums, ops.unstack(sums)[COUNT] if self.ratio else items)
        loss = self.ledger.own_mean(ops.unstack(sums)[LOSS], sums, unit, scale)
        return ops.depend(loss, ended), outputs

    def add_micro_batch(self, sums, times, micro_batch, scale):
        """One micro-batch of a batch that Python cuts. `times` : how often the batch is expected to have this
        micro-batch's items; 4.0 for one of four equal ones. `sums` : the batch's sums so far, then its items. Returns
        the new `sums` , the batch's mean loss so far, and the outputs."""
        items = self.measure.count(*micro_batch)
        unit = self.open.unit(scale, self.ledger.expected(items) * times, self.open.window_steps + 0)
        rows = micro_batch[0].shape[0] if micro_batch[0].ndim > 0 else 1
        part = self.enter(self.measure_of_loop, unit, rows, *micro_batch)
        row = part[0]
        items = ops.unstack(row)[COUNT] if self.ratio else items
        sums = self.open.with_saturation_noted(sums + ops.concat((row, items.reshape((1,)))))
        mean = self.ledger.own_mean(ops.unstack(sums)[LOSS], sums[:SUMS], unit, scale)
        return (sums, mean, *part[1:])

    def add_up(self, inputs, plan, scale, unit):
        """Forward, backward and add for each micro-batch of a batch; returns the batch's sums and outputs."""
        if self.has_outputs:  # no loss of the whole batch, so there is nothing to prepare
            sums, outputs = self.add_up_and_join(inputs, plan, unit)
            return sums, self.means(outputs, sums, scale, unit)
        sums, prepared, inputs = self.measure.prepare(self.ledger.zero_sums(), unit, inputs, plan)
        of_loop, of_rest = self.measure_of_loop, self.measure_of_rest
        if not self.ledger.leaves_out:
            return micro_batches.add_up(self.add, of_loop, of_rest, sums, inputs, plan, unit, prepared), ()
        sums = self.add_some(of_loop, sums, inputs, plan, 0, unit)
        if plan[micro_batches.REST] > 0:
            rest = micro_batches.plan_of_rest(plan)
            sums = self.add_some(of_rest, sums, inputs, rest, plan[micro_batches.LOOPED], unit)
        return sums, ()

    def add(self, measure, unit, prepared, rows, *micro_batch):
        """Run and add a micro-batch; returns its row."""
        # Passed with `*` : graph mode forgets the length of a tuple of equal shapes inside an `if` on a Tensor.
        items = measure.items(rows, *micro_batch)
        numerators, items, _, gradients = measure.run(unit, prepared, rows, items, *micro_batch)
        return self.ledger.added(unit, numerators, items, gradients)

    def enter(self, measure, unit, rows, *micro_batch):
        """A micro-batch outside of a loop, which may be left out; returns its row, and its outputs."""
        if not self.ledger.may_not_run:
            return self.run_and_enter(measure, unit, rows, *micro_batch)
        whole = micro_batches.plan_of_whole(rows, len(micro_batch))
        return (self.add_some(measure, self.ledger.zero_sums(), micro_batch, whole, 0, unit),)

    def run_and_enter(self, measure, unit, rows, *micro_batch):
        items = measure.items(rows, *micro_batch)
        numerators, items, outputs, gradients = measure.run(unit, (), rows, items, *micro_batch)
        if not self.ledger.judges:
            return (self.ledger.added(unit, numerators, items, gradients), *outputs)
        belongs = self.ledger.belongs(numerators, items)
        row = self.ledger.left_out(belongs, items)
        takes = self.ledger.takes(belongs, numerators, gradients)
        while takes:
            row = self.ledger.added(unit, numerators, items, gradients)
            takes = ms.Tensor(False)
        return (row, *self.ledger.outputs_of(outputs, row, belongs))

    # In the loops below an inner loop runs once or not at all: see the rules at the head of step.py. It must be in the
    # same function as the loop, so `add_judged` cannot call `run_and_enter` .

    def add_some(self, measure, sums, inputs, plan, start, unit):
        """The micro-batches from sample `start` on, of which some may be left out; returns the new sums."""
        state = (ms.Tensor(start, ms.int32), sums)
        if self.ledger.may_not_run:
            return self.add_counted(measure, state, inputs, plan, unit)[1]
        return self.add_judged(measure, state, inputs, plan, unit)[1]

    def add_counted(self, measure, state, inputs, plan, unit):
        """The loop over micro-batches that are judged by their items, before they run."""
        while state[0] < plan[micro_batches.LOOPED]:
            rows = micro_batches.rows_from(state[0], plan)
            micro_batch = micro_batches.take(inputs, state[0], rows, plan[micro_batches.AXES])
            items = measure.items(rows, *micro_batch)
            belongs = self.ledger.belongs((), items)
            row = self.ledger.left_out(belongs, items)
            takes = self.ledger.takes(belongs, (), ())
            while takes:
                numerators, counted, _, gradients = measure.run(unit, (), rows, items, *micro_batch)
                row = self.ledger.added(unit, numerators, counted, gradients)
                takes = ms.Tensor(False)
            for term in range(self.ledger.terms):
                alone = self.ledger.runs_alone(term, belongs)
                while alone:
                    part, gradients_alone = measure.run_alone(term, unit, items, *micro_batch)
                    row = row + ops.depend(part, self.store.add(gradients_alone))
                    alone = ms.Tensor(False)
            state = micro_batches.following(state, (row,), rows)
        return state

    def add_judged(self, measure, state, inputs, plan, unit):
        """The loop over micro-batches that are judged when they ran. `state` : as in `add_up_and_join` ."""
        while state[0] < plan[micro_batches.LOOPED]:
            rows = micro_batches.rows_from(state[0], plan)
            micro_batch = micro_batches.take(inputs, state[0], rows, plan[micro_batches.AXES])
            items = measure.items(rows, *micro_batch)
            numerators, items, outputs, gradients = measure.run(unit, (), rows, items, *micro_batch)
            belongs = self.ledger.belongs(numerators, items)
            row = self.ledger.left_out(belongs, items)
            takes = self.ledger.takes(belongs, numerators, gradients)
            while takes:
                row = self.ledger.added(unit, numerators, items, gradients)
                takes = ms.Tensor(False)
            for term in range(self.ledger.terms):
                alone = self.ledger.runs_alone(term, belongs)
                while alone:
                    part, gradients_alone = measure.run_alone(term, unit, items, *micro_batch)
                    row = row + ops.depend(part, self.store.add(gradients_alone))
                    alone = ms.Tensor(False)
            state = micro_batches.following(state, (row, *self.ledger.outputs_of(outputs, row, belongs)), rows)
        return state

    def add_up_and_join(self, inputs, plan, unit):
        """As `add_up` , with outputs, which have samples on axis 0, or shape (). Returns the sums and the batch's
        outputs."""
        samples, size, axes = plan[micro_batches.SAMPLES], plan[micro_batches.SIZE], plan[micro_batches.AXES]
        # A loop carries Tensors of fixed shapes, and the network's outputs are known only after its first run. So the
        # first micro-batch runs before the loop. The network is then in the graph twice, which costs only compile time.
        start = ms.Tensor(0, ms.int32)
        micro_batch = micro_batches.take(inputs, start, size, axes)
        first = self.run_and_enter(self.measure_of_first, unit, size, *micro_batch)
        # Each output is as long as the batch, with the first micro-batch's rows at its end. An iteration appends its
        # rows and removes as many in front. The tuple begins with an int32, because graph mode forgets the length of a
        # tuple of equal shapes that a loop carries.
        state: tuple = (start + size, first[0])
        for index in range(1, len(first)):
            output = first[index]
            if output.ndim > 0:
                output = ops.gather(output, micro_batches.padded_in_front(samples, size), 0)
            state = (*state, output)
        of_loop, looped, rest = self.measure_of_loop, plan[micro_batches.LOOPED], plan[micro_batches.REST]
        if isinstance(size, ms.Tensor) or looped > size:
            if self.ledger.judges:
                state = self.add_judged(of_loop, state, inputs, plan, unit)
            else:
                while state[0] < looped:
                    rows = micro_batches.rows_from(state[0], plan)
                    micro_batch = micro_batches.take(inputs, state[0], rows, axes)
                    part = self.run_and_enter(of_loop, unit, rows, *micro_batch)
                    state = micro_batches.following(state, part, rows)
        if rest > 0:
            micro_batch = micro_batches.take_rest(inputs, looped, axes)
            part = self.run_and_enter(self.measure_of_rest, unit, rest, *micro_batch)
            state = micro_batches.following(state, part, rest)
        return state[1], state[2:]

    def means(self, outputs, sums, scale, unit):
        """The outputs; those of shape () are divided as this rank's loss is."""
        result: tuple = ()
        for index in range(len(outputs)):
            output = outputs[index]
            if output.ndim == 0:
                output = self.ledger.own_mean(output, sums, unit, scale)
            result = (*result, output)
        return result

    # -- not compiled --------------------------------------------------------------------------------------------------

    def plan_in_python(self, shapes: Sequence[tuple[int, ...]]) -> micro_batches.SplitPlan:
        """Where a batch with inputs of these shapes is cut."""
        arguments = shapes, self.micro_size, self.micro_batch_size, self.shared, self.axis
        self._least.judge(micro_batches.plan_split(*arguments).size)
        return micro_batches.plan_split(*arguments, self._least.read())

    def check_outputs(
        self, inputs: Sequence[ms.Tensor], plan: micro_batches.SplitPlan, weights: Sequence[ms.Parameter]
    ) -> None:
        """Before the first batch: check what the network returns beside its loss at another number of samples than a
        micro-batch has, so that none fits by chance."""
        if self._outputs_are_checked:
            return
        self._outputs_are_checked = True
        network = self.measure.network_of_rows
        if network is None:
            return
        finds_size = self.micro_size is None and self.micro_batch_size is None
        rows = 1 + (2 if finds_size else plan.size)
        places = np.arange(rows) % plan.samples  # from the first one anew where there are fewer
        part = rows_of(inputs, cut_axes(len(inputs), self.shared, self.axis), places)
        shapes = shapes_if_taken(network, part, weights)
        if shapes is not None:
            self.measure.check_shapes(shapes, rows)

    def reset_eagerly(self) -> None:
        """After a batch failed: see `Ledger.reset_eagerly` ."""
        self.ledger.reset_eagerly()
