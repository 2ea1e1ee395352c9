"""A step of one graph, which cuts the batch itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms

from gaccum_ms.backend.micro_mirrors import unreduced
from gaccum_ms.backend.parameters import overwrite
from gaccum_ms.checks.batches import batch_shapes
from gaccum_ms.options.options import Options
from gaccum_ms.semi_auto import modes as auto_parallel
from gaccum_ms.splitting.even_split import cut, cut_axes
from gaccum_ms.training.components import Components
from gaccum_ms.training.runner import Batch, Runner


def even_micro_batches(window: Any, options: Options, inputs: Sequence[ms.Tensor]) -> list[list[ms.Tensor]]:
    """The micro-batches of a batch, as the graph cuts it."""
    plan = window.plan_in_python(batch_shapes(tuple(inputs)))
    return cut(inputs, plan, cut_axes(len(inputs), options.shared, options.axis))


def even_batch(components: Components, inputs: tuple[Any, ...]) -> Batch:
    """The checked batch, which a graph cuts. A first batch that is smaller than `micro_size` is an error; a later one
    is a short last batch."""
    options, window = components.options, components.window
    components.check_inputs(len(inputs))
    shapes = batch_shapes(inputs)
    plan = window.plan_in_python(shapes)
    if window.measure.ranks_share_a_loss:
        window.measure.check_plan(plan)  # first, because all ranks must
    too_short = options.micro_size is not None and options.micro_size > plan.samples
    if too_short and not int(components.batch_count.asnumpy()):
        raise ValueError(
            f"For 'GradAccumulationCell', the argument 'micro_size' is the number of micro-batches and must not be "
            f"larger than the batch, but got micro_size={options.micro_size} and a batch of {plan.samples} sample(s). "
            f"Use a larger batch or a smaller 'micro_size'; samples per micro-batch are set by 'micro_batch_size'."
        )
    window.check_outputs(inputs, plan, components.weights)
    return Batch(inputs, lambda: even_micro_batches(window, options, inputs), inputs)


class OneGraph(Runner):
    """Runs the step's graph, and after a window's last batch that of its end, where it is one of its own."""

    def __init__(self, components: Components, run_graph: Any) -> None:
        self._components = components
        self._run_graph = run_graph

    def prepare(self, inputs: tuple[Any, ...]) -> Batch:
        return even_batch(self._components, inputs)

    def run(self, batch: Batch) -> Any:
        outputs = self._run_graph()(*batch.inputs)
        components = self._components
        end: Any = components.end_window
        if end is None or not end.branches or not components.window.open.is_full:
            return outputs
        overflow = end.run_alone(outputs[0] if isinstance(outputs, tuple) else outputs)
        return (outputs[0], overflow, *outputs[2:]) if components.update.scaled else outputs


class CompilerGraph(Runner):
    """Runs the step's graph in the modes in which MindSpore's compiler distributes it, cuts and accumulates. `network`
    is as the step got it: an AutoParallel's settings apply at each call."""

    def __init__(self, network: Any, components: Components, run_graph: Any) -> None:
        self._network = network
        self._components = components
        self._add: Any = components.end_window  # the graph of a batch that does not end its window
        self._last: Sequence[ms.Tensor] = ()  # the window's last batch so far, for a flush
        self._run_graph = run_graph

    def prepare(self, inputs: tuple[Any, ...]) -> Batch:
        window, options = self._components.window, self._components.options
        self._components.check_inputs(len(inputs))
        shapes = [shape for position, shape in enumerate(batch_shapes(inputs)) if position not in options.shared]
        auto_parallel.check_batch(shapes, options.micro_size)
        return Batch(inputs, lambda: even_micro_batches(window, options, inputs), inputs)

    def run(self, batch: Batch) -> Any:
        with auto_parallel.settings_of(self._network):
            auto_parallel.check_device()
            if self._components.spans_batches:
                window, self._last = self._components.window.open, batch.inputs
                if not window.batches:
                    overwrite(window.window_unit, self._components.update.scale())  # the scale of the whole window
                window.begin_eagerly()
                if not window.is_full:
                    with unreduced():
                        return self._add(*batch.inputs)
            return self._run_graph()(*batch.inputs)

    def flush(self) -> bool:
        """End the open window: run its last batch again, of which nothing is added."""
        components = self._components
        if not components.window.open.batches:
            return False
        updates, batches = (int(count.asnumpy()) for count in (components.update.update_count, components.batch_count))
        overwrite(components.window.batch_weight, ms.Tensor(0.0, ms.float32))
        try:
            with auto_parallel.settings_of(self._network):
                self._run_graph()(*self._last)
        finally:
            overwrite(components.window.batch_weight, ms.Tensor(1.0, ms.float32))
            overwrite(components.batch_count, ms.Tensor(batches, ms.int32))
        return int(components.update.update_count.asnumpy()) > updates
