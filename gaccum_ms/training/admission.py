"""Checks before a step or an accumulator trains: one clear error, or a warning, before anything changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import mindspore as ms
from mindspore import nn

from gaccum_ms.backend import graphs
from gaccum_ms.backend.newer_optimizers import refuse_without_kernels
from gaccum_ms.backend.user_warnings import warn_user
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.checks.arguments import check_bool, check_is_optimizer, check_one_of, check_optimizer
from gaccum_ms.cpu.convolutions import limit_instructions_for, limit_instructions_for_weights
from gaccum_ms.distributed.ranks import check_parallel_mode, refuse_hooked_weights
from gaccum_ms.distributed.stages import stages
from gaccum_ms.layers.batchnorm import refuse_sync_batch_norm
from gaccum_ms.layers.sparse import refuse_sparse_gradients
from gaccum_ms.options import compatibility
from gaccum_ms.options.options import Options, check_each
from gaccum_ms.options.rules import IN_LOOPS, PIPELINE, SEMI_AUTO, Setup
from gaccum_ms.semi_auto import modes
from gaccum_ms.semi_auto.pipeline import check_pipeline


def admit(owner: str, cell: GradAccumulationCell, optimizer: nn.Optimizer) -> Setup:
    """The options of a whole cell, which are checked, and its network."""
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


def accumulator_options(**values: Any) -> Options:
    """The checked options of a `GradAccumulator` ."""
    owner = "GradAccumulator"
    if values["reduction"] is not None:
        check_one_of(owner, "reduction", values["reduction"], ("mean", "sum"))
    check_bool(owner, "jit", values["jit"])
    options = Options(loss_weights=(1.0,), **values)
    check_each(owner, options)
    return dataclasses.replace(options, transforms=tuple(options.transforms))


def admit_weights(owner: str, optimizer: Any) -> ms.ParameterTuple:
    """The weights that an optimizer updates, for the accumulator, which has no network."""
    check_is_optimizer(owner, optimizer)
    refuse_without_kernels(owner, optimizer)
    refuse_hooked_weights(owner, optimizer.parameters)
    check_parallel_mode(owner)
    weights = ms.ParameterTuple(optimizer.parameters)
    limit_instructions_for_weights(weights)
    return weights


# -- loops of the user's -----------------------------------------------------------------------------------------------


class Scaling:
    """Whether losses are multiplied by the loss scale. It is a separate object, so that the accumulator does not refer
    to itself: when such a cell is garbage-collected, MindSpore compiles another cell's graph a second time."""

    def __init__(self, needed: bool) -> None:
        self.missing = needed

    def note(self) -> None:
        self.missing = False

    def check(self) -> None:
        if self.missing:
            raise RuntimeError(
                "For 'GradAccumulator', losses must be multiplied by the loss scale before they are differentiated, "
                "because 'scale_sense' was given and gradients are divided by it, but neither 'scale' was called nor "
                "'scale_sense' read. Nothing was added. Differentiate accumulator.scale(loss), or leave 'scale_sense' "
                "out."
            )


def refuse_graphs() -> None:
    raise RuntimeError(
        "For 'GradAccumulator', with 'scheduler' the accumulator must be called by Python, which steps it, but it is "
        "part of another graph, as in a function with mindspore.jit. Leave 'scheduler' out, and step it yourself."
    )


def can_compile(functions: Iterable[Any]) -> bool:
    """Whether PyNative mode can compile the accumulator with these; says why not. In graph mode it must."""
    problem = None if graphs.runs_eagerly(jit=True) else graphs.uncompilable(functions)
    if problem is not None and ms.get_context("mode") == ms.PYNATIVE_MODE:
        warn_user(
            f"For 'GradAccumulator', 'transforms' and the optimizer are compiled from their lines of source, but got "
            f"{problem}. So the accumulator runs eagerly, which takes longer. Define it by 'def' or 'class' in a file, "
            f"or give jit=False."
        )
        return False
    return True
