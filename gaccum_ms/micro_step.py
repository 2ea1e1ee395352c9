"""One micro-step by itself: forward, backward and add, without an update and without other ranks, for a trial.

What it adds to are accumulators of its own. What else it changes, BatchNorm's moving statistics and the default
generator, is put back. On CPU, random kernels have generators of their own, in each graph anew: a trial draws nothing
from those of the training step.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.accumulator import Accumulators
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.convolutions import limit_instructions_for
from gaccum_ms.memory_meter import AllocatorMeter, ProcessMeter
from gaccum_ms.own_graph import OwnGraph, compiling_alone
from gaccum_ms.pynative_tape import forget_interrupted_gradient
from gaccum_ms.snapshot import Snapshot
from gaccum_ms.window import float32_losses


class MicroStep(OwnGraph):
    """Forward, backward and add, of all its inputs at once."""

    def __init__(self, cell: GradAccumulationCell, weights: ms.ParameterTuple, accumulators: Accumulators) -> None:
        super().__init__(bool(cell.jit))
        self.network = cell.network
        self.losses = len(cell.loss_weights)
        self.accumulators = accumulators
        self.backward = ops.value_and_grad(self.loss, None, weights)

    def construct(self, *inputs):
        loss, gradients = self.backward(*inputs)
        return ops.depend(loss, self.accumulators.add(gradients))

    def loss(self, *inputs):
        total = ms.Tensor(0.0, ms.float32)
        for loss in float32_losses(self.network(*inputs), self.losses):
            total = total + loss
        return total


class MicroSteps:
    """Tries micro-steps of a batch's first samples, and measures each size once.

    Args:
        cell (GradAccumulationCell): The network and the options.
        optimizer (Optimizer): Has the weights.
        batch (Sequence[Tensor]): The inputs of one batch.
        meter (ProcessMeter or AllocatorMeter): Measures.
    """

    def __init__(
        self,
        cell: GradAccumulationCell,
        optimizer: nn.Optimizer,
        batch: Sequence[ms.Tensor],
        meter: ProcessMeter | AllocatorMeter,
    ) -> None:
        limit_instructions_for(cell.network)
        self.cell = cell
        self.batch = batch
        self.meter = meter
        self.weights = ms.ParameterTuple(optimizer.parameters)
        self.accumulators = Accumulators(self.weights, cell.accumulator_dtype, cell.compensated)
        self.used: dict[int, int] = {}  # samples of a micro-batch: bytes

    @property
    def accumulator_bytes(self) -> int:
        return sum(one.nbytes for one in self.accumulators.get_parameters())

    def measure(self, size: int) -> int:
        """Bytes that a micro-step of `size` samples uses, weights and accumulators included. All it changes is put
        back, also when it fails."""
        if size not in self.used:
            micro_batch = [value[:size] for value in self.batch]
            before = Snapshot(self.cell, leave_out=self.weights)
            try:
                # Compiled once, and gone with its memory at the end of this method.
                step = MicroStep(self.cell, self.weights, self.accumulators).set_train()
                with compiling_alone():
                    self.used[size] = self.meter.used_by(lambda: step.run_alone(*micro_batch).asnumpy())  # waits
            except BaseException as error:
                forget_interrupted_gradient(error)
                raise
            finally:
                before.restore()
        return self.used[size]
