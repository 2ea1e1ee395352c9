"""What differs by parallel mode. Stand-alone and data parallel share one step; its reducer is MindSpore's own.

In data parallel mode `nn.TrainOneStepCell` builds the `nn.DistributedGradReducer` that obeys ``gradients_mean``; the
step calls it once per update, after the loop. Where counts decide, ranks add up sums, not means, whatever
``gradients_mean`` says, and the sums of losses and counts go with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
from mindspore import nn, ops
from mindspore.communication import get_group_size

from gaccum_ms import accumulator


def broadcast_parameters(step: nn.Cell) -> None:
    """Give all ranks rank 0's values, where ``parameter_broadcast`` asks for it. MindSpore does so when it compiles a
    graph, and in PyNative mode not at all."""
    if ms.get_auto_parallel_context("parameter_broadcast"):
        from_rank_0 = ops.Broadcast(0)
        for parameter in step.get_parameters():
            if not parameter.layerwise_parallel:
                (value,) = from_rank_0((parameter.astype(ms.float32),))
                accumulator.overwrite(parameter, value.astype(parameter.dtype))


class InOrder(nn.Cell):
    """MindSpore's reducer, one gradient after the other. All ranks must run their collectives in the same order, and
    those of a graph MindSpore orders by the graph, which a ShardedOptimizer makes another one on each rank.

    Args:
        weights (Sequence[Parameter]): The weights whose gradients are reduced.
        mean (bool): Whether to divide by the number of ranks.
        degree (int): That number.
    """

    def __init__(self, weights: Sequence[ms.Parameter], mean: bool, degree: int) -> None:
        super().__init__(auto_prefix=False)
        reducers = [nn.DistributedGradReducer([weight], mean=mean, degree=degree) for weight in weights]
        self.reducers = nn.CellList(reducers, auto_prefix=False)

    def construct(self, gradients):
        reduced: tuple = ()
        for index in range(len(self.reducers)):
            gradient = gradients[index]
            if index > 0:
                gradient = ops.depend(gradient, reduced[index - 1])
            reduced = (*reduced, self.reducers[index]((gradient,))[0])
        return reduced


class SumOverRanks(nn.Cell):
    """Sum gradients, and with them a window's sums, over all ranks; on one rank, hand them through.

    Args:
        weights (Sequence[Parameter]): The weights whose gradients are summed.
        shape (tuple[int, ...]): Shape of the window's sums.
    """

    def __init__(self, weights: Sequence[ms.Parameter], shape: tuple[int, ...]) -> None:
        super().__init__(auto_prefix=False)
        self.reduces = ms.get_auto_parallel_context("parallel_mode") == ms.ParallelMode.DATA_PARALLEL
        self.ranks = get_group_size() if self.reduces else 1
        if self.reduces:
            # The reducer asks of each Parameter how it is to be reduced; of the sums' only this one knows.
            sums = ms.Parameter(ops.zeros(shape, ms.float32), name="sums", requires_grad=False)
            self.reducer = InOrder([*weights, sums], mean=False, degree=self.ranks)
            self.small_reducer = nn.DistributedGradReducer([sums], mean=False, degree=self.ranks)

    def summed_ranks(self) -> float:
        """How many times its own mean the ranks make of a gradient together: 1 by ``gradients_mean``, else one each."""
        if self.reduces and not ms.get_auto_parallel_context("gradients_mean"):
            return float(self.ranks)
        return 1.0

    def construct(self, gradients, sums):
        if not self.reduces:
            return gradients, sums
        reduced = self.reducer((*gradients, sums))
        return reduced[:-1], reduced[-1]

    def alone(self, sums):
        """Sum over ranks what goes without gradients."""
        if not self.reduces:
            return sums
        return self.small_reducer((sums,))[0]


def check_parallel_mode(owner: str) -> None:
    """Refuse, before anything is built, the modes in which MindSpore's compiler would have to cut our loop in parts.

    Raises:
        RuntimeError: In semi-auto, auto and hybrid parallel mode, and with pipeline stages.
    """
    mode = ms.get_auto_parallel_context("parallel_mode")
    if mode not in (ms.ParallelMode.STAND_ALONE, ms.ParallelMode.DATA_PARALLEL):
        raise RuntimeError(
            f"For '{owner}', the parallel mode must be 'stand_alone' or 'data_parallel', but got "
            f"'{mode}'. In this mode use MindSpore's own 'mindspore.parallel.nn.GradAccumulation' (Ascend or GPU), "
            f"whose loss is the sum over micro-batches; or set parallel_mode='data_parallel'."
        )
    stages = ms.get_auto_parallel_context("pipeline_stages")
    if stages > 1:
        raise RuntimeError(
            f"For '{owner}', 'pipeline_stages' must be 1, but got {stages}. A pipeline splits its batches "
            f"itself: use 'mindspore.parallel.nn.Pipeline'."
        )
