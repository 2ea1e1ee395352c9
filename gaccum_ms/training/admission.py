"""Checks of the arguments of a step or an accumulator: one clear error, or a warning, before anything changes."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import nn

from gaccum_ms.backend.newer_optimizers import refuse_without_kernels
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.checks.arguments import check_is_optimizer, check_optimizer, described
from gaccum_ms.cpu.convolutions import limit_instructions_for, limit_instructions_for_weights
from gaccum_ms.distributed.ranks import check_parallel_mode, refuse_hooked_weights
from gaccum_ms.distributed.stages import stages
from gaccum_ms.layers.batchnorm import refuse_sync_batch_norm
from gaccum_ms.layers.sparse import refuse_sparse_gradients
from gaccum_ms.options import compatibility
from gaccum_ms.options.rules import IN_LOOPS, PIPELINE, SEMI_AUTO, Setup
from gaccum_ms.semi_auto import modes
from gaccum_ms.semi_auto.pipeline import check_pipeline


def admit(owner: str, cell: GradAccumulationCell, optimizer: nn.Optimizer) -> Setup:
    """The checked options and network of a training step."""
    cell.check_options(is_whole=True)
    check_optimizer(owner, cell, optimizer)
    refuse_without_kernels(owner, optimizer)
    refuse_hooked_weights("GradAccumulationCell", optimizer.parameters)
    check_parallel_mode("GradAccumulationCell", compiler_distributes=True)
    setup = Setup(cell.options, cell.network, modes.compiler_distributes())
    compatibility.check(SEMI_AUTO if setup.compiler_distributes else IN_LOOPS, "GradAccumulationCell", setup)
    if setup.compiler_distributes:
        modes.check_network(cell.network)
        if stages() > 1:
            compatibility.check(PIPELINE, "GradAccumulationCell", setup)
            check_pipeline(cell.network, setup.options.micro_size)
    refuse_sparse_gradients(cell)
    if cell.auto:
        refuse_sync_batch_norm("GradAccumulationCell", cell)
    limit_instructions_for(cell.network)
    return setup


def admit_weights(owner: str, optimizer: Any) -> ms.ParameterTuple:
    """The weights that an optimizer updates, for the accumulator, which has no network."""
    check_is_optimizer(owner, optimizer)
    refuse_without_kernels(owner, optimizer)
    refuse_hooked_weights(owner, optimizer.parameters)
    check_parallel_mode(owner)
    weights = ms.ParameterTuple(optimizer.parameters)
    limit_instructions_for_weights(weights)
    return weights


def check_gradients(gradients: Any, weights: Sequence[ms.Parameter]) -> None:
    if not isinstance(gradients, (tuple, list)) or not all(isinstance(gradient, ms.Tensor) for gradient in gradients):
        raise TypeError(
            f"For 'GradAccumulator', 'gradients' must be a tuple of Tensors, but got {described(gradients)}."
        )
    shapes, wanted = [gradient.shape for gradient in gradients], [weight.shape for weight in weights]
    if shapes != wanted:
        raise ValueError(
            f"For 'GradAccumulator', 'gradients' must have the number and shapes of the optimizer's parameters, "
            f"{wanted}, but got {shapes}. Differentiate with respect to 'optimizer.parameters'."
        )


def checked_count(count: Any) -> ms.Tensor:
    """The count as a Tensor: each Python number would compile another graph."""
    value: Any = count.asnumpy()[()] if isinstance(count, ms.Tensor) and count.shape == () else count
    if isinstance(value, bool) or not isinstance(value, numbers.Real):  # NumPy's numbers too, but not its bool
        raise TypeError(
            f"For 'GradAccumulator', 'count' must be a number or a Tensor of shape (), but got {described(count)}."
        )
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(
            f"For 'GradAccumulator', 'count' must be finite and not negative, but got {value}. Nothing was added."
        )
    return ms.Tensor(number, ms.float32)


def checked_loss(loss: Any) -> ms.Tensor:
    """A batch's loss as a Tensor, for the same reason."""
    if isinstance(loss, ms.Tensor) and loss.size == 1 and loss.is_floating_point():
        return loss
    if isinstance(loss, bool) or not isinstance(loss, numbers.Real):
        raise TypeError(
            f"For 'GradAccumulator', 'loss' must be a number or a Tensor with one, the batch's loss without loss "
            f"scale, but got {described(loss)}."
        )
    return ms.Tensor(float(loss), ms.float32)
