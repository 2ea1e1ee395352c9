"""Runs an update with a cell's options and one on the whole batch, from the same values, and compares them.

It compares the finished gradient, not only the updated parameters: an optimizer such as Adam divides by the gradient's
own size, so that its update looks right with a gradient that is K times too large.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Container, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from gaccum_ms.accumulation import accumulators
from gaccum_ms.auditing.evidence import Evidence, Update
from gaccum_ms.backend.eager_means import mean_of_elements
from gaccum_ms.backend.held_cells import held_values
from gaccum_ms.backend.snapshot import Snapshot, as_numpy
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.layers.dropout import dropouts
from gaccum_ms.layers.window_batchnorm import WindowBatchNorm
from gaccum_ms.losses import counts
from gaccum_ms.losses.batch_loss import WithBatchLossCell
from gaccum_ms.proof.comparison import computes_in_16_bits
from gaccum_ms.proof.first_batch import FirstBatch
from gaccum_ms.proof.samples import joined
from gaccum_ms.splitting.even_split import cut_axes
from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell

_SEED = 1


def measured(
    cell: GradAccumulationCell,
    recorder: Recorder,
    before: Snapshot,
    batch: tuple[ms.Tensor, ...],
    tolerance: float,
) -> Evidence:
    """The evidence; with a remedy, if one is needed and known. Values are restored after each run."""

    def restored(function: Callable, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        finally:
            before.restore_values()

    step = _silent_step(_unclipped(cell), recorder)
    losses = _Losses(cell).set_train()
    whole_step = _whole_batch_step(cell, recorder).set_train()
    for layer in dropouts(cell.network).values():
        layer.add_flags(training=False)
    accumulated = restored(_run, step, batch, recorder, cell.network)
    whole = restored(_run, whole_step, batch, recorder, cell.network)
    axes = cut_axes(len(batch), cell.shared, cell.axis)
    once, again, twice = (
        restored(_losses_of, losses, inputs) for inputs in (batch, batch, joined((batch, batch), axes))
    )
    evidence = Evidence(cell, recorder.parameters, whole, accumulated, once, again, twice, tolerance)
    if not evidence.may_have_a_remedy:
        return evidence
    proof = FirstBatch("audit", cell.network, [cell.network], cell.options, is_asked_for=True)
    proof.look(batch, axes, functools.partial(step.micro_batches_of, batch))
    return dataclasses.replace(evidence, remedy=proof.verdict.remedy)


class Recorder(nn.Cell):
    """The optimizer, with a record of its gradient. It clips after recording, instead of the step: a gradient that is
    clipped first would look right with a wrong size."""

    def __init__(self, optimizer: nn.Optimizer, max_grad_norm: float | None) -> None:
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer
        self.parameters = optimizer.parameters
        self.max_grad_norm = max_grad_norm
        self.gradients = accumulators.allocate(self.parameters, ms.float32, "audit_gradients.")
        self.map = ops.HyperMap()

    def construct(self, gradients):
        gradients = ops.depend(gradients, self.map(accumulators.add_to, self.gradients, gradients))
        if self.max_grad_norm not in (None, math.inf):
            gradients = ops.clip_by_global_norm(gradients, self.max_grad_norm)
        return self.optimizer(gradients)


class _Losses(nn.Cell):
    """The network's loss or losses, without its other outputs. A separate cell, so that the network keeps no graph of
    the audit."""

    def __init__(self, cell: GradAccumulationCell) -> None:
        super().__init__(auto_prefix=False)
        self.network = cell.network
        self.ratio, self.aux, self.min_count = cell.returns_ratio, cell.aux, cell.min_count

    def construct(self, *inputs):
        outputs = self.network(*inputs)
        if self.ratio:
            return outputs[0] / ops.stop_gradient(counts.at_least(counts.valid_or_nan(outputs[1]), self.min_count))
        return outputs[0] if self.aux else outputs


def _losses_of(losses: nn.Cell, batch: Sequence[ms.Tensor]) -> np.ndarray:
    outputs = losses(*batch)
    return np.array([as_numpy(loss) for loss in (outputs if isinstance(outputs, tuple) else (outputs,))])


def _run(step: nn.Cell, batch: Sequence[ms.Tensor], recorder: Recorder, network: nn.Cell) -> Update:
    ms.manual_seed(_SEED)
    with mean_of_elements():  # for MindSpore's own step in PyNative mode; ours does so itself
        loss, *outputs = outputs if isinstance(outputs := step(*batch), tuple) else (outputs,)
    return Update(
        float(as_numpy(loss)),
        [as_numpy(gradient) for gradient in recorder.gradients],
        [as_numpy(parameter) for parameter in recorder.parameters],
        _state(network, {id(weight) for weight in recorder.parameters}),
        [as_numpy(output) for output in outputs],
    )


def _state(network: nn.Cell, weights: Container[int]) -> dict[str, np.ndarray]:
    """What the network may write besides the weights, whose ids are given: other Parameters, buffers and Tensors that
    are attributes. Layers whose moving statistics a training step moves are left out."""
    return {
        value.name if isinstance(value, ms.Parameter) else f"{name}.{key}".strip("."): as_numpy(value)
        for name, cell in network.cells_and_names()
        if not isinstance(cell, WindowBatchNorm)
        for key, value in held_values(cell)
        if isinstance(value, ms.Tensor) and id(value) not in weights and _is_state(cell, key, value)
    }


def _is_state(cell: nn.Cell, key: str, value: ms.Tensor) -> bool:
    if isinstance(value, ms.Parameter) or key.startswith("_buffers."):
        return True
    # MindSpore's layers keep Tensors that were never computed, such as nn.Embedding's `init_tensor` .
    return not type(cell).__module__.startswith("mindspore.") and not value.has_init


def _unclipped(cell: GradAccumulationCell, **size: Any) -> GradAccumulationCell:
    """A cell with the same options and network, for one batch, without clipping, which the recorder does."""
    return cell.with_options(accumulation_steps=1, max_grad_norm=None, transforms=(), record_noise=False, **size)


def _silent_step(cell: GradAccumulationCell, recorder: Recorder) -> nn.Cell:
    """A step without advice, which the report contains."""
    step = TrainOneStepWithGradAccumulationCell(cell, recorder).set_train()
    step.advice.is_silent = True
    return step


def _whole_batch_step(cell: GradAccumulationCell, recorder: Recorder) -> nn.Cell:
    """MindSpore's own step if it supports the options, so that our step is not compared with itself."""
    gathers = isinstance(cell.network, WithBatchLossCell) and cell.network.ranks > 1
    if cell.own_count is not None or cell.several_losses or cell.returns_ratio or cell.aux or gathers:
        whole = {"micro_size": 1, "micro_batch_size": None} | ({"split": None} if cell.trims else {})
        return _silent_step(_unclipped(cell, **whole), recorder)
    return nn.TrainOneStepCell(cell.network, recorder).set_train()


def rounding(cell: GradAccumulationCell, weights: Sequence[ms.Parameter]) -> float:
    dtypes = [cell.accumulators.dtype, *(weight.dtype for weight in weights)]
    return 2e-2 if computes_in_16_bits([cell], dtypes) else 1e-4
