"""The search of `find_micro_batch_size` and of automatic sizes: the largest micro-batch that fits on all ranks, by
prediction and few trials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.backend import no_grad
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.distributed.layout import rank_and_ranks
from gaccum_ms.layers.batchnorm import refuse_sync_batch_norm
from gaccum_ms.memory.forecast import Forecast
from gaccum_ms.memory.report import check_trial
from gaccum_ms.memory.trial import MakeStep, RealTraining

_FEW = (2, 4)  # samples: a line through these predicts larger sizes; one sample runs other kernels
_JUMP = 64  # times the largest size that fits: a line through small sizes says little about much larger ones
_FAR = 1.25  # a size this many times the found one is worth a trial, even if it is predicted not quite to fit
# The sizes found on this rank: by network, and then by everything else that they depend on.
_sizes_of_networks: WeakKeyDictionary[nn.Cell, dict[tuple, int]] = WeakKeyDictionary()


def found_size(
    owner: str,
    cell: GradAccumulationCell,
    optimizer: nn.Optimizer,
    batch: Sequence[ms.Tensor],
    memory_limit: int | None,
    fails: Callable[[BaseException], bool],
    make_step: MakeStep,
    training: RealTraining | None = None,
) -> tuple[int, tuple]:
    """What :func:`find_micro_batch_size` returns, and the key for `found_less` . `make_step` and `training` : see
    `Trials` ."""
    check_trial(owner, cell, optimizer, batch, memory_limit)
    refuse_sync_batch_norm(owner, cell.network)
    sizes_found = _sizes_of_networks.setdefault(cell.network, {})
    key = _search_key(cell, optimizer, batch, memory_limit, fails)
    if key not in sizes_found:
        alone = rank_and_ranks()[1] == 1  # with several ranks the step has collectives, and a trial has no partners
        forecast = Forecast(owner, cell, optimizer, batch, make_step, memory_limit, fails, training if alone else None)
        sizes_found[key] = _largest(forecast) * forecast.multiple_of
    try:
        return agreed_size(owner, sizes_found[key], memory_limit), key
    except RuntimeError:
        del sizes_found[key]
        raise


def _search_key(
    cell: GradAccumulationCell,
    optimizer: nn.Optimizer,
    batch: Sequence[ms.Tensor],
    memory_limit: int | None,
    fails: Callable[[BaseException], bool],
) -> tuple:
    """Everything that the size found for a network depends on."""
    where = ms.get_context("device_target"), ms.get_context("device_id"), ms.get_context("mode")
    shapes = tuple((tuple(value.shape), str(value.dtype)) for value in batch)
    weights = tuple(
        (parameter.name, tuple(parameter.shape), str(parameter.dtype)) for parameter in optimizer.get_parameters()
    )
    flags = (inner.get_flags() for _, inner in cell.network.cells_and_names())
    casts = tuple(tuple(flag.get(dtype) for dtype in ("fp16", "fp32", "bf16")) for flag in flags)
    # Not the function itself: it may refer to the network, which would then never be freed.
    test = fails.__qualname__ if hasattr(fails, "__qualname__") else type(fails).__qualname__, id(fails)
    worst = cell.split.worst_case(*batch) if cell.trims else None  # with `MaxTokens` , trials depend on it
    widths = worst and (worst.widths, worst.most)
    return shapes, weights, casts, cell.options.for_memory(), widths, where, memory_limit, test


def found_less(network: nn.Cell, key: tuple, size: int) -> None:
    """Replace the size that was found: training has run out of memory with it, on some rank."""
    _sizes_of_networks[network][key] = size


def _largest(forecast: Forecast) -> int:
    """The largest size that fits on this rank; 0 if none fits."""
    sizes = forecast.sizes
    few = [size for size in sizes if size in _FEW]
    for size in few[::-1]:  # from these, larger sizes are predicted
        forecast.measure(size)
    fitting = [size for size in few if forecast.may_fit(size)]
    if not fitting and 1 not in few:
        forecast.measure(1)
        fitting = [1] * forecast.may_fit(1)
    if not fitting:
        return 0
    # First the sizes without a smaller last micro-batch: their graph has one part less, and needs less memory.
    largest = _climb(forecast, [size for size in sizes if not forecast.is_ragged(size)], max(fitting))
    largest = _climb(forecast, sizes, largest)
    if forecast.samples not in forecast.measured:
        forecast.probe_whole()
        largest = _climb(forecast, sizes[-1:], largest)
    return _beyond(forecast, largest)


def _climb(forecast: Forecast, sizes: list[int], largest: int) -> int:
    """The largest of these sizes that fits, or `largest` . Each time, the largest size predicted to fit is tried, of at
    most `_JUMP` times the samples: a trial that is far too large could pass the limit before it is ended."""
    failures = 0
    while larger := [size for size in sizes if largest < size <= _JUMP * largest and forecast.may_fit(size)]:
        # After a failure, predictions are known to be too small: bisect the remaining sizes.
        size = larger[len(larger) // 2] if failures else larger[-1]
        forecast.measure(size)
        if forecast.may_fit(size):
            largest = size
        else:
            failures += 1
    return largest


def _beyond(forecast: Forecast, largest: int) -> int:
    """A larger size, if it is far from `largest` and fits, contrary to its prediction. One even size is tried, and one
    ragged size, whose graph has other parts and may need less."""
    for ragged in (False, True):
        for size in forecast.sizes:
            is_new = size >= _FAR * largest and size not in forecast.measured
            if forecast.is_ragged(size) == ragged and is_new and forecast.is_close(size):
                peak = forecast.measure(size)
                largest = size if peak is not None and forecast.keeps(peak) else largest
                break
    return largest


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
