"""A step of one graph, which cuts the batch itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms

from gaccum_ms.checks.arguments import batch_shapes
from gaccum_ms.options.options import Options
from gaccum_ms.semi_auto import modes as auto_parallel
from gaccum_ms.splitting.even_split import cut, cut_axes
from gaccum_ms.training.parts import Parts
from gaccum_ms.training.runner import Batch


def even_micro_batches(window: Any, options: Options, inputs: Sequence[ms.Tensor]) -> list[list[ms.Tensor]]:
    """The micro-batches of a batch, as the graph cuts it."""
    plan = window.plan_in_python(batch_shapes(tuple(inputs)))
    return cut(inputs, plan, cut_axes(len(inputs), options.shared, options.axis))


def even_batch(parts: Parts, inputs: tuple[Any, ...]) -> Batch:
    """The checked batch, which a graph cuts. A first batch that is smaller than `micro_size` is an error; a later one
    is a short last batch."""
    options, window = parts.options, parts.window
    shapes = batch_shapes(inputs)
    plan = window.plan_in_python(shapes)
    window.check_plan(plan)  # first, because all ranks must
    too_short = options.micro_size is not None and options.micro_size > plan.samples
    if too_short and not int(parts.batch_count.asnumpy()):
        raise ValueError(
            f"For 'GradAccumulationCell', the argument 'micro_size' is the number of micro-batches and must not be "
            f"larger than the batch, but got micro_size={options.micro_size} and a batch of {plan.samples} sample(s). "
            f"Use a larger batch or a smaller 'micro_size'; samples per micro-batch are set by 'micro_batch_size'."
        )
    window.find_output_axes(inputs, plan, parts.weights)
    return Batch(inputs, (plan.size, plan.rest), lambda: even_micro_batches(window, options, inputs), inputs)


class OneGraph:
    """Runs the step's graph."""

    def __init__(self, parts: Parts, run_graph: Any) -> None:
        self._parts = parts
        self._run_graph = run_graph

    def prepare(self, inputs: tuple[Any, ...]) -> Batch:
        return even_batch(self._parts, inputs)

    def run(self, batch: Batch) -> Any:
        self._parts.window.begin_call()
        return self._run_graph()(*batch.inputs)

    def agree(self) -> None:
        """Nothing: all ranks run the same graph."""


class CompilerGraph:
    """Runs the step's graph in the modes in which MindSpore's compiler distributes it, cuts and accumulates. `network`
    is as the step got it: an AutoParallel's settings apply at each call."""

    def __init__(self, network: Any, parts: Parts, run_graph: Any) -> None:
        self._network = network
        self._parts = parts
        self._run_graph = run_graph

    def prepare(self, inputs: tuple[Any, ...]) -> Batch:
        window, options = self._parts.window, self._parts.options
        auto_parallel.check_batch(batch_shapes(inputs), options.micro_size)
        return Batch(inputs, (), lambda: even_micro_batches(window, options, inputs), inputs)

    def run(self, batch: Batch) -> Any:
        with auto_parallel.settings_of(self._network):
            auto_parallel.check_device()
            return self._run_graph()(*batch.inputs)

    def agree(self) -> None:
        """Nothing: there is no window to flush."""
