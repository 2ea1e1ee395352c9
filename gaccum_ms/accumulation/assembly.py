"""Which window a training step has: the options choose the four parts of window.py, which are combined here."""

from __future__ import annotations

from dataclasses import dataclass

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.accumulation.accumulators import GradientSums, NoSums
from gaccum_ms.accumulation.copies import Copies
from gaccum_ms.accumulation.grad_cache import TwoPasses
from gaccum_ms.accumulation.micro_step import OneLoss, SeveralLosses
from gaccum_ms.accumulation.noise import ALL_SUMS
from gaccum_ms.accumulation.open_window import OpenWindow
from gaccum_ms.accumulation.outputs import LossWithOutputs
from gaccum_ms.accumulation.several_losses import ByCountsOfEach
from gaccum_ms.accumulation.weighing import ByCounts, ByCountsWithOutputs, BySamples, WeighingParts
from gaccum_ms.accumulation.window import Window
from gaccum_ms.backend.graphs import gradients_allowed, graph_run
from gaccum_ms.backend.random_operators import forbid_reuse, needs_copies, shallow_copy, with_other_seeds
from gaccum_ms.distributed.all_reduce import FusedReducer
from gaccum_ms.options.options import Options
from gaccum_ms.options.rules import Setup


@dataclass(frozen=True)
class Kinds:
    """The classes of a window's parts. The store is missing: the options alone decide it."""

    micro_step: type = OneLoss
    weighing: type[BySamples | ByCounts | ByCountsOfEach] = BySamples
    window: type[Window] = Window
    open_window: type[OpenWindow] | None = None  # None: a window is one batch


def kinds_of(setup: Setup, spans_batches: bool) -> Kinds:
    """The classes for these options."""
    if setup.of_batch:
        return Kinds(micro_step=TwoPasses)
    if setup.options.several_losses:
        return Kinds(SeveralLosses, ByCountsOfEach)
    counts = setup.options.counted or spans_batches
    open_window = OpenWindow if spans_batches else None
    if setup.options.returns_ratio or setup.options.aux:
        weighing = ByCountsWithOutputs if counts else BySamples
        return Kinds(LossWithOutputs, weighing, open_window=open_window)
    return Kinds(weighing=ByCounts if counts else BySamples, open_window=open_window)


def combined(
    kinds: Kinds,
    setup: Setup,
    weights: ms.ParameterTuple,
    grad_reducer: nn.Cell,
    position: ms.Parameter,
) -> Window:
    """The window. `position` : batches of the open window so far, int32 of shape ()."""
    options = setup.options
    spans = kinds.open_window is not None
    micro_step = kinds.micro_step(options, setup.network, weights)
    form = options.accumulators.dtype, options.accumulators.compensated
    store = GradientSums(weights, *form) if options.accumulates or spans else NoSums()
    parts = WeighingParts(options, weights, grad_reducer, micro_step, store, position if spans else None)
    weighing = kinds.weighing(parts)
    open_window = None
    if kinds.open_window is not None:
        of_window = store, weighing.reduction, position, options.accumulation_steps, options.drops
        open_window = kinds.open_window("GradAccumulationCell", *of_window)

    def copy_of_weighing(number: int) -> nn.Cell | None:
        if not needs_copies(setup.network):
            return None
        forbid_reuse(graph_run(otherwise=weighing), setup.network)
        first = number * (1 + options.losses)
        network = with_other_seeds(setup.network, first) if number else setup.network
        with gradients_allowed():
            copied = kinds.micro_step(options, network, weights)
            if options.several_losses:
                alone = [with_other_seeds(network, first + 1 + term) for term in range(options.losses)]
                copied.run_alone_on(alone, options, weights)
        return shallow_copy(weighing, micro_step=copied)

    copies = None if setup.of_batch else Copies(copy_of_weighing)  # its two passes must draw the same
    return kinds.window(options, micro_step, weighing, store, open_window, copies)


def fused_reducer(options: Options, step: nn.TrainOneStepCell) -> FusedReducer:
    """Replaces MindSpore's reducer, with the same group: AdaSum's optimizers have groups of eight ranks."""
    group = step.grad_reducer.allgather.group
    noise = [ms.Parameter(ops.zeros((ALL_SUMS,), ms.float32), requires_grad=False)] * options.record_noise
    return FusedReducer([*step.weights, *noise], step.mean, step.degree, group)
