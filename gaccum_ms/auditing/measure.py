"""Runs an update with a cell's options and one on the whole batch, from the same values, and compares them.

It compares the finished gradient, not only the updated parameters: an optimizer such as Adam divides by the gradient's
own size, so that its update looks right with a gradient that is K times too large.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from gaccum_ms.accumulation import accumulators
from gaccum_ms.auditing.evidence import Evidence, Update
from gaccum_ms.auditing.remedies import find_remedy
from gaccum_ms.backend.eager_means import mean_of_elements
from gaccum_ms.backend.held_cells import held_values
from gaccum_ms.backend.snapshot import Snapshot, as_numpy
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.layers.batchnorm import batch_norm_names
from gaccum_ms.layers.dropout import dropouts
from gaccum_ms.layers.window_batchnorm import WindowBatchNorm
from gaccum_ms.losses import counts
from gaccum_ms.losses.batch_loss import WithBatchLossCell
from gaccum_ms.proof.broadcasting import broadcast_input
from gaccum_ms.proof.comparison import computes_in_16_bits
from gaccum_ms.splitting.even_split import UNCUT, cut_axes
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
    inner = _unclipped(cell)
    step = TrainOneStepWithGradAccumulationCell(inner, recorder).set_train()
    step.advice.silence()  # the report contains it
    whole_step = _whole_batch_step(cell, recorder).set_train()
    losses = _Losses(cell).set_train()
    dropout_layers = _switch_dropout_off(cell.network)
    state = _State(cell.network, recorder.parameters)

    def restored(function: Callable, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        finally:
            before.restore_values()

    run = functools.partial(restored, _run, recorder, state)
    loss_of = functools.partial(restored, losses.on)

    # Micro-batches, or the batch twice over, may not fit the network, because another axis counts samples.
    accumulated, error = _attempt(lambda: run(step, batch))
    whole = run(whole_step, batch)
    outputs = restored(losses.outputs_on, batch) if cell.aux and not cell.trims else []
    whole = dataclasses.replace(whole, outputs=outputs)
    if accumulated is None:
        no_numbers = [np.full_like(gradient, np.nan) for gradient in whole.gradients]
        accumulated = dataclasses.replace(whole, loss=np.nan, gradients=no_numbers)
    elif not outputs:
        accumulated = dataclasses.replace(accumulated, outputs=[])
    once = loss_of(batch)
    pairs = list(zip(batch, cut_axes(len(batch), cell.shared, cell.axis), strict=True))
    twice, second_error = _attempt(
        lambda: loss_of([value if axis == UNCUT else ops.concat((value, value), axis) for value, axis in pairs])
    )
    error = error or second_error
    evidence = Evidence(
        names=tuple(weight.name for weight in recorder.parameters),
        whole=whole,
        accumulated=accumulated,
        once=once,
        again=loss_of(batch),
        twice=np.full_like(once, np.nan) if twice is None else twice,
        tolerance=tolerance,
        reduction=cell.reduction,
        of_batch=isinstance(cell.network, WithBatchLossCell),
        counted=cell.counted,
        trimmed=cell.trims,
        batch_norm_layers=tuple(batch_norm_names(cell.network)),
        dropout_layers=dropout_layers,
    )
    if not evidence.may_have_a_remedy:
        if error is not None:
            raise error
        return evidence

    def train(trial: GradAccumulationCell) -> Update:
        trial_step = TrainOneStepWithGradAccumulationCell(trial, recorder).set_train()
        trial_step.advice.silence()
        _switch_dropout_off(cell.network)
        return run(trial_step, batch)

    micro_batches = step.micro_batches_of(batch)

    def loss_on(micro_batch: Sequence[ms.Tensor]) -> float:
        return float(loss_of(micro_batch)[0])

    if error is None:
        broadcast = broadcast_input(inner.options, inner.network, batch, micro_batches, loss_on, tolerance)
        if broadcast is not None:
            return dataclasses.replace(evidence, broadcast=broadcast)
    remedy = find_remedy(evidence, inner, batch, micro_batches, loss_on, train)
    if error is not None and remedy is None:
        raise error
    return dataclasses.replace(evidence, remedy=remedy)


def _attempt(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """The result, or the error of the network; our own errors are raised."""
    try:
        return function(), None
    except Exception as error:
        if str(error).startswith("For 'GradAccumulationCell'"):
            raise
        return None, error


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

    def outputs_on(self, batch: Sequence[ms.Tensor]) -> list[np.ndarray]:
        """The network's other outputs."""
        return [as_numpy(output) for output in _Outputs(self.network, 2 if self.ratio else 1).set_train()(*batch)]

    def on(self, batch: Sequence[ms.Tensor]) -> np.ndarray:
        losses = self(*batch)
        return np.array([as_numpy(loss) for loss in (losses if isinstance(losses, tuple) else (losses,))])


class _Outputs(nn.Cell):
    """The network's outputs after its first ones."""

    def __init__(self, network: nn.Cell, first: int) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.first = first

    def construct(self, *inputs):
        return self.network(*inputs)[self.first :]


class _State:
    """What a network may write besides the weights: other Parameters, buffers and Tensors that are attributes. Layers
    whose moving statistics a training step moves are left out."""

    def __init__(self, network: nn.Cell, weights: Sequence[ms.Parameter]) -> None:
        self._weights = {id(weight) for weight in weights}
        self._cells = [
            (name, cell) for name, cell in network.cells_and_names() if not isinstance(cell, WindowBatchNorm)
        ]

    def read(self) -> dict[str, np.ndarray]:
        """All values, by name."""
        return {
            value.name if isinstance(value, ms.Parameter) else f"{name}.{key}".strip("."): as_numpy(value)
            for name, cell in self._cells
            for key, value in held_values(cell)
            if isinstance(value, ms.Tensor) and self._is_state(cell, key, value)
        }

    def _is_state(self, cell: nn.Cell, key: str, value: ms.Tensor) -> bool:
        if isinstance(value, ms.Parameter) or key.startswith("_buffers."):
            return id(value) not in self._weights
        # MindSpore's layers keep Tensors that were never computed, such as nn.Embedding's `init_tensor` .
        return not type(cell).__module__.startswith("mindspore.") and not value.has_init


def _run(recorder: Recorder, state: _State, step: nn.Cell, batch: Sequence[ms.Tensor]) -> Update:
    ms.manual_seed(_SEED)
    with mean_of_elements():  # for MindSpore's own step in PyNative mode; ours does so itself
        loss, *outputs = outputs if isinstance(outputs := step(*batch), tuple) else (outputs,)
    return Update(
        float(as_numpy(loss)),
        [as_numpy(gradient) for gradient in recorder.gradients],
        [as_numpy(parameter) for parameter in recorder.parameters],
        state.read(),
        [as_numpy(output) for output in outputs],
    )


def _unclipped(cell: GradAccumulationCell, **size: Any) -> GradAccumulationCell:
    """A cell with the same options and network, for one batch, without clipping, which the recorder does."""
    return cell.with_options(accumulation_steps=1, max_grad_norm=None, transforms=(), record_noise=False, **size)


def _whole_batch_step(cell: GradAccumulationCell, recorder: Recorder) -> nn.Cell:
    """MindSpore's own step if it supports the weighting, so that our step is not compared with itself."""
    gathers = isinstance(cell.network, WithBatchLossCell) and cell.network.ranks > 1
    if cell.own_count is not None or cell.several_losses or gathers:
        whole = {"micro_size": 1, "micro_batch_size": None} | ({"split": None} if cell.trims else {})
        step = TrainOneStepWithGradAccumulationCell(_unclipped(cell, **whole), recorder)
        step.advice.silence()
        return step
    more = cell.returns_ratio or cell.aux
    return nn.TrainOneStepCell(_Losses(cell) if more else cell.network, recorder)


def _switch_dropout_off(network: nn.Cell) -> tuple[str, ...]:
    layers = dropouts(network)
    for layer in layers.values():
        layer.add_flags(training=False)
    return tuple(layers)


def rounding(cell: GradAccumulationCell, weights: Sequence[ms.Parameter]) -> float:
    dtypes = [cell.accumulators.dtype, *(weight.dtype for weight in weights)]
    return 2e-2 if computes_in_16_bits([cell], dtypes) else 1e-4
