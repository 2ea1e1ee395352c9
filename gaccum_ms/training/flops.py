"""The FLOPs of a batch, for `mindspore.train.FlopsUtilizationCollector` : it counts the operators of the step's graph,
but not those in a loop. They are counted in a graph of a micro-batch, which is compiled and never run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from gaccum_ms.backend import cell_graph_executor, flops_collector
from gaccum_ms.semi_auto.modes import compiler_distributes
from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell


class _Gradients(nn.Cell):
    """The forward and backward pass of a micro-batch."""

    def __init__(self, step: TrainOneStepWithGradAccumulationCell) -> None:
        super().__init__(auto_prefix=False)
        self.differentiate = ops.value_and_grad(step.network, None, step.weights, has_aux=step.options.aux)

    def construct(self, *inputs):
        return self.differentiate(*inputs)


@contextmanager
def counted_in_loops(step: TrainOneStepWithGradAccumulationCell, data_set: Any) -> Iterator[None]:
    """Within it, MindSpore's collector also counts the operators in the loop of the step."""
    count, gradients = flops_collector.flops_collection, _Gradients(step)

    def count_with_loop(phase: str) -> tuple[Any, ...]:
        *flops, is_dynamic = count(phase)
        if phase.startswith("train") and not compiler_distributes():  # the compiler's graphs have no loop
            batch = [
                ms.Tensor(np.zeros(shape, dtype))
                for shape, dtype in zip(data_set.output_shapes(), data_set.output_types(), strict=True)
            ]
            flops = count_each(step.micro_batches_of(batch))
        return (*flops, is_dynamic)

    def count_each(micro_batches: Sequence[Sequence[ms.Tensor]]) -> list[float]:
        total = np.zeros(4)  # of the model, and with what is computed twice; on all devices, and on this one
        for _, group in itertools.groupby(micro_batches, lambda inputs: [value.shape for value in inputs]):
            first, *others = group
            phase, _ = cell_graph_executor.compile(gradients, *first, phase="train")
            total += (1 + len(others)) * np.array(count(phase)[:4])
        return total.tolist()

    flops_collector.flops_collection = count_with_loop
    try:
        yield
    finally:
        flops_collector.flops_collection = count
