"""The search of `find_micro_batch_size` and of automatic sizes: the largest micro-batch that fits on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.backend import no_grad
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.distributed.layout import rank_and_ranks
from gaccum_ms.layers.batchnorm import refuse_sync_batch_norm
from gaccum_ms.memory.forecast import Forecast
from gaccum_ms.memory.report import check_trial
from gaccum_ms.memory.trial import MakeStep


def found_size(
    owner: str,
    cell: GradAccumulationCell,
    optimizer: nn.Optimizer,
    batch: Sequence[ms.Tensor],
    memory_limit: int | None,
    fails: Callable[[BaseException], bool],
    make_step: MakeStep,
) -> int:
    """What :func:`find_micro_batch_size` returns. `make_step` makes the step of a trial."""
    check_trial(owner, cell, optimizer, batch, memory_limit)
    refuse_sync_batch_norm(owner, cell.network)
    forecast = Forecast(owner, cell, optimizer, batch, make_step, memory_limit, fails)
    while (size := forecast.next_size()) is not None:
        forecast.measure(size)
    return agreed_size(owner, forecast.found() * forecast.trials.unit, memory_limit)


def agreed_size(owner: str, size: int, memory_limit: int | None) -> int:
    """The smallest size of all ranks. A collective, if there are several ranks. All raise if one has 0, not even one
    sample."""
    sizes = [size]
    if rank_and_ranks()[1] > 1:
        with no_grad():
            gathered: Any = ops.AllGather()(ms.Tensor([size], ms.int32))
        sizes = gathered.asnumpy().tolist()
    if not min(sizes):
        ranks = [rank for rank, size in enumerate(sizes) if not size]
        limit = "the memory that there is" if memory_limit is None else f"memory_limit={memory_limit}"
        raise RuntimeError(
            f"For '{owner}', a micro-batch of one sample must fit, but got {limit}, which is not enough on rank(s) "
            f"{ranks}. Use a smaller network or lower precision, Accumulators(dtype=None), or "
            f"gaccum_ms.ShardedOptimizer; 'memory_report' says what needs how much."
        )
    return min(sizes)
