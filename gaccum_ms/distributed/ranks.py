"""The differences between parallel modes. Stand-alone and data parallel share one step, which reduces once per update.

When micro-batches are weighted by samples, gradients are reduced after the loop, and averaged or summed according to
``gradients_mean`` . When they are weighted by counts, ranks add up sums with either value of ``gradients_mean`` , and
the sums of losses and counts are sent with the gradients. all_reduce.py sends them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank

from gaccum_ms.backend.parameters import overwrite
from gaccum_ms.distributed.all_reduce import FusedReducer
from gaccum_ms.distributed.stages import stages


def broadcast_parameters(step: nn.Cell) -> None:
    """Give all ranks rank 0's values, if ``parameter_broadcast`` is set. MindSpore does so whenever it compiles a
    graph, for which all ranks must then wait, and never in PyNative mode."""
    if ms.get_auto_parallel_context("parameter_broadcast"):
        from_rank_0 = ops.Broadcast(0)
        for parameter in step.get_parameters():
            if not parameter.layerwise_parallel:
                overwrite(parameter, _sent(parameter, from_rank_0))


def _sent(parameter: ms.Parameter, from_rank_0: Any) -> ms.Tensor:
    """Rank 0's value. Not all devices send all dtypes, so it travels in one that loses nothing."""
    if parameter.dtype in (ms.float16, ms.bfloat16, ms.float32):
        (value,) = from_rank_0((parameter.astype(ms.float32),))
        return value.astype(parameter.dtype)
    own = parameter.asnumpy()
    words = np.frombuffer(own.tobytes() + bytes(-own.nbytes % 4), np.int32)
    (value,) = from_rank_0((ms.Tensor(words),))
    return ms.Tensor(np.frombuffer(value.asnumpy().tobytes()[: own.nbytes], own.dtype).reshape(own.shape))


def advice_about_ranks(owner: str) -> str | None:
    """What to say where several processes train and nothing joins them; None otherwise."""
    ranks = group_size_or_1()
    if ranks == 1 or ms.get_auto_parallel_context("parallel_mode") != ms.ParallelMode.STAND_ALONE:
        return None
    return (
        f"For '{owner}', gradients are reduced over ranks in data parallel mode, but got {ranks} ranks in mode "
        f"'stand_alone': each trains by itself, and their weights drift apart. After init(), and before the network is "
        f"made, call mindspore.set_auto_parallel_context(parallel_mode='data_parallel', gradients_mean=True)."
    )


def rank_or_0() -> int:
    """This rank; 0 if `init` was not called."""
    try:
        return get_rank()
    except RuntimeError:
        return 0


def group_size_or_1() -> int:
    """The number of ranks in any parallel mode; 1 if `init` was not called."""
    try:
        return get_group_size()
    except (RuntimeError, ValueError):
        return 1


class SumOverRanks(nn.Cell):
    """Sum gradients, and with them a window's sums, over all ranks; on one rank, return them unchanged. `shape` : that
    of the window's sums."""

    def __init__(self, weights: Sequence[ms.Parameter], shape: tuple[int, ...]) -> None:
        super().__init__(auto_prefix=False)
        self.reduces = ms.get_auto_parallel_context("parallel_mode") == ms.ParallelMode.DATA_PARALLEL
        self.ranks = get_group_size() if self.reduces else 1
        if self.reduces:
            # The reducer needs a Parameter for each Tensor; this one stands for the window's sums.
            sums = ms.Parameter(ops.zeros(shape, ms.float32), name="sums", requires_grad=False)
            self.reducer = FusedReducer([*weights, sums], mean=False, degree=self.ranks)

    def summed_ranks(self) -> float:
        """The factor between the ranks' mean and the reduced gradient: 1 with ``gradients_mean`` , else the ranks."""
        if self.reduces and not ms.get_auto_parallel_context("gradients_mean"):
            return float(self.ranks)
        return 1.0

    def construct(self, gradients, sums):
        if not self.reduces:
            return gradients, sums
        reduced = self.reducer((*gradients, sums))
        return reduced[:-1], reduced[-1]

    def alone(self, sums):
        """Sum over ranks a Tensor that is sent without gradients."""
        if not self.reduces:
            return sums
        return self.reducer.over_ranks(sums)


_COMPILERS_MODES = (ms.ParallelMode.SEMI_AUTO_PARALLEL, ms.ParallelMode.AUTO_PARALLEL)


def compiler_distributes() -> bool:
    """Whether the compiler distributes graphs in the present parallel mode."""
    return ms.get_auto_parallel_context("parallel_mode") in _COMPILERS_MODES


def check_parallel_mode(owner: str, compiler_distributes: bool = False) -> None:
    """Refuse, before anything is built, the modes in which gradients would mean something else.
    `compiler_distributes` : whether the owner supports semi-auto and auto parallel mode."""
    mode = ms.get_auto_parallel_context("parallel_mode")
    known = [ms.ParallelMode.STAND_ALONE, ms.ParallelMode.DATA_PARALLEL]
    if compiler_distributes:
        known += _COMPILERS_MODES
    if mode not in known:
        raise RuntimeError(
            f"For '{owner}', the parallel mode must be {' or '.join(map(repr, known))}, but got '{mode}'. "
            + (
                "Use parallel_mode='semi_auto_parallel', which also knows weights that lie on several devices."
                if compiler_distributes
                else "In this mode use gaccum_ms.GradAccumulationCell; or set parallel_mode='data_parallel'."
            )
        )
    if stages() > 1 and mode not in _COMPILERS_MODES:
        raise RuntimeError(
            f"For '{owner}', 'pipeline_stages' must be 1 in parallel mode '{mode}', but got {stages()}. Use "
            f"gaccum_ms.GradAccumulationCell in semi-auto or auto parallel mode."
        )


def refuse_hooked_weights(owner: str, weights: Iterable[ms.Parameter]) -> None:
    """Refuse weights of MindSpore's DistributedDataParallel. Its hook on a weight adds the gradient to a bucket,
    reduces that, and returns what it holds: the second micro-batch's gradient then contains the first one's."""
    names = [weight.name for weight in weights if "main_grad" in vars(weight)]  # which it gives its weights
    if names:
        raise ValueError(
            f"For '{owner}', the gradients of weights must come without hooks, but got '{names[0]}' and "
            f"{len(names) - 1} other(s) in a DistributedDataParallel. Its hooks reduce each micro-batch's gradient, "
            f"together with those before it. Make the network without it: data parallel mode reduces by itself, once "
            f"per update, after init() and mindspore.set_auto_parallel_context(parallel_mode='data_parallel', "
            f"gradients_mean=True)."
        )
