"""What differs by parallel mode. Stand-alone and data parallel share one step, which reduces once per update.

When micro-batches are weighted by samples, gradients are reduced after the loop, and averaged or summed as
``gradients_mean`` says. When they are weighted by counts, ranks add up sums and not means, whatever ``gradients_mean``
says, and the sums of losses and counts are sent with them. all_reduce.py is how gradients are sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank

from gaccum_ms.backend.parameters import overwrite
from gaccum_ms.distributed.all_reduce import FusedReducer


def broadcast_parameters(step: nn.Cell) -> None:
    """Give all ranks rank 0's values, where ``parameter_broadcast`` asks for it. MindSpore does so with each graph that
    it compiles, at which all ranks must then be, and in PyNative mode not at all."""
    if ms.get_auto_parallel_context("parameter_broadcast"):
        from_rank_0 = ops.Broadcast(0)
        for parameter in step.get_parameters():
            if not parameter.layerwise_parallel:
                (value,) = from_rank_0((parameter.astype(ms.float32),))
                overwrite(parameter, value.astype(parameter.dtype))


def rank_or_0() -> int:
    """This rank; 0 where `init` was not called."""
    try:
        return get_rank()
    except RuntimeError:
        return 0


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
            self.reducer = FusedReducer([*weights, sums], mean=False, degree=self.ranks)

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
        return self.reducer.over_ranks(sums)


def check_parallel_mode(owner: str, compiler_distributes: bool = False) -> None:
    """Refuse, before anything is built, the modes in which gradients would not be what they are taken for.

    Args:
        owner (str): The class that errors name.
        compiler_distributes (bool): Whether it knows semi-auto and auto parallel mode.

    Raises:
        RuntimeError: In hybrid parallel mode, in the modes that `owner` does not know, and with pipeline stages.
    """
    mode = ms.get_auto_parallel_context("parallel_mode")
    known = [ms.ParallelMode.STAND_ALONE, ms.ParallelMode.DATA_PARALLEL]
    if compiler_distributes:
        known += [ms.ParallelMode.SEMI_AUTO_PARALLEL, ms.ParallelMode.AUTO_PARALLEL]
    if mode not in known:
        raise RuntimeError(
            f"For '{owner}', the parallel mode must be {' or '.join(map(repr, known))}, but got '{mode}'. "
            + (
                "Use parallel_mode='semi_auto_parallel', which also knows weights that lie on several devices."
                if compiler_distributes
                else "In this mode use gaccum_ms.GradAccumulationCell; or set parallel_mode='data_parallel'."
            )
        )
    stages = ms.get_auto_parallel_context("pipeline_stages")
    if stages > 1:
        raise RuntimeError(
            f"For '{owner}', 'pipeline_stages' must be 1, but got {stages}. A pipeline splits its batches and "
            f"accumulates itself: use 'mindspore.nn.PipelineCell' ('mindspore.parallel.nn.Pipeline')."
        )
