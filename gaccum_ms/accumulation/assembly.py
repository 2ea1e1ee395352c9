"""Which window a training step has: the options choose its measure, ledger and store, which are combined here."""

from __future__ import annotations

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.accumulation.accumulators import GradientSums, NoSums
from gaccum_ms.accumulation.grad_cache import TwoPasses
from gaccum_ms.accumulation.ledger import DividedAfterwards, KnownShares, Ledger, SharesOfLosses
from gaccum_ms.accumulation.measure import Measure
from gaccum_ms.accumulation.noise import ALL_SUMS
from gaccum_ms.accumulation.open_window import OpenWindow
from gaccum_ms.accumulation.window import Window
from gaccum_ms.distributed.all_reduce import FusedReducer
from gaccum_ms.options.options import Options
from gaccum_ms.options.rules import Setup


def window_of(setup: Setup, weights: ms.ParameterTuple, grad_reducer: nn.Cell, position: ms.Parameter | None) -> Window:
    """The window. `position` : batches of the open window so far, int32 of shape (); None: each batch is a window."""
    options, network = setup.options, setup.network
    store = NoSums()
    if options.accumulates or position is not None:
        store = GradientSums(weights, options.accumulators.dtype, options.accumulators.compensated)
    if setup.of_batch:
        shares = KnownShares(options, store, grad_reducer, loss_is_mean=False)
        return Window(options, TwoPasses(network, weights), shares)
    if position is None and not options.counted and not options.several_losses:
        shares = KnownShares(options, store, grad_reducer, options.loss_is_mean)
        return Window(options, Measure(options, network, weights, counted=False), shares)
    ledger: Ledger
    if options.several_losses:
        ledger = SharesOfLosses(options, store, grad_reducer, weights)
    else:
        open_window = None
        if position is not None:
            open_window = OpenWindow("GradAccumulationCell", store, position, options.accumulation_steps)
        ledger = DividedAfterwards(options, weights, store, open_window, by_samples=not options.counts_items)
    return Window(options, Measure(options, network, weights, counted=True), ledger)


def fused_reducer(options: Options, step: nn.TrainOneStepCell) -> FusedReducer:
    """Replaces MindSpore's reducer, with the same group: AdaSum's optimizers have groups of eight ranks."""
    group = step.grad_reducer.allgather.group
    noise = [ms.Parameter(ops.zeros((ALL_SUMS,), ms.float32), requires_grad=False)] * options.record_noise
    return FusedReducer([*step.weights, *noise], step.mean, step.degree, group)
