"""The search of `find_micro_batch_size` and of automatic sizes: the largest micro-batch that fits on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import ops

from gaccum_ms.backend import no_grad
from gaccum_ms.distributed.layout import rank_and_ranks
from gaccum_ms.memory.forecast import Forecast
from gaccum_ms.memory.trial import Trials


def found_size(trials: Trials, fails: Callable[[BaseException], bool]) -> int:
    """The largest size, in samples or tokens. `fails` : whether an error means that memory is not enough."""
    forecast = Forecast(trials, fails)
    while (size := forecast.next_size()) is not None:
        forecast.measure(size)
    return agreed_size(trials.owner, forecast.found() * trials.unit, trials.given_limit)


def agreed_size(owner: str, size: int, limit: int | None) -> int:
    """The smallest size of all ranks. A collective, if there are several ranks. All raise if one has 0, not even one
    sample."""
    sizes = [size]
    if rank_and_ranks()[1] > 1:
        with no_grad():
            gathered: Any = ops.AllGather()(ms.Tensor([size], ms.int32))
        sizes = gathered.asnumpy().tolist()
    if not min(sizes):
        ranks = [rank for rank, size in enumerate(sizes) if not size]
        memory = "the memory that there is" if limit is None else f"memory_limit={limit}"
        raise RuntimeError(
            f"For '{owner}', a micro-batch of one sample must fit, but got {memory}, which is not enough on rank(s) "
            f"{ranks}. Use a smaller network or lower precision, Accumulators(dtype=None), or "
            f"gaccum_ms.ShardedOptimizer; 'memory_report' says what needs how much."
        )
    return min(sizes)
