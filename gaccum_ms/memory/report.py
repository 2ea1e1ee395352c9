"""memory_report: finds the numbers of micro-batches that fit, before a training runs out of memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
from mindspore import nn

from gaccum_ms.backend.newer_optimizers import refuse_without_kernels
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.checks.arguments import check_optimizer, check_positive_int
from gaccum_ms.checks.batches import batch_shapes
from gaccum_ms.distributed.layout import rank_and_ranks
from gaccum_ms.distributed.ranks import check_parallel_mode, compiler_distributes
from gaccum_ms.memory.forecast import Forecast
from gaccum_ms.memory.trial import MakeStep, bytes_of, state_of
from gaccum_ms.options import compatibility
from gaccum_ms.options.rules import REPORT, TRIAL, Setup
from gaccum_ms.splitting.even_split import plan_split

_NAME = "memory_report"
_ENOUGH = 50_000_000  # bytes between two measurements


@dataclass(frozen=True)
class MemoryRow:
    """The row of one number of micro-batches: `MemoryReport` explains the fields."""

    micro_size: int
    micro_batch_size: int
    intermediate: int  # with workspace, and of the update too
    intermediate_measured: int | None
    peak: int
    peak_measured: int | None
    fits: bool  # whether the peak, measured if it was, is within the limit


@dataclass(frozen=True)
class MemoryReport:
    r"""
    The result of :func:`memory_report` ; ``print(report)`` shows a table.

    All sizes are in bytes, on this rank. ``fits_from`` is the smallest number of micro-batches from which on all fit,
    or ``None`` .

    Args:
        rank (int): This rank.
        what (str): The kind of memory that is measured.
        parameters (int): The size of the parameters.
        optimizer_state (int): The size of the optimizer's state.
        accumulators (int): Present if there is more than one micro-batch.
        batch (int): The size of the batch.
        framework (int): The remainder: the framework, its compiled graphs, the process.
        memory_limit (int): The limit.
        probed (tuple[int, ...]): The measured sizes, in samples, from which others are predicted.
        rows (tuple): For each number of micro-batches: ``micro_size`` , the number; ``micro_batch_size`` , the samples
            in each; ``intermediate`` and ``peak`` , predicted, of intermediate values and of everything;
            ``intermediate_measured`` and ``peak_measured`` , ``None`` if it was not run; and ``fits`` .

    Raises:
        TypeError: If a field is left out.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from gaccum_ms import MemoryReport
        >>> report = MemoryReport(0, "resident memory", 400, 400, 400, 64, 9000, 20000, (), ())
        >>> print(report.fits_from)
        None
    """

    rank: int
    what: str
    parameters: int
    optimizer_state: int
    accumulators: int
    batch: int
    framework: int
    memory_limit: int
    probed: tuple[int, ...]
    rows: tuple[MemoryRow, ...]

    @property
    def fits_from(self) -> int | None:
        """The smallest micro_size of the table from which on all sizes fit; None if the last does not."""
        fitting = list(itertools.takewhile(lambda row: row.fits, reversed(self.rows)))
        return fitting[-1].micro_size if fitting else None

    def __str__(self) -> str:
        exact = {
            "parameters": self.parameters,
            "optimizer state": self.optimizer_state,
            "accumulators": self.accumulators,
            "batch": self.batch,
            "framework": self.framework,
        }
        lines = [f"rank {self.rank}, {self.what}, MB"]
        lines += [f"{name:15}  {_mb(size):>9}" for name, size in exact.items()]
        lines.append("                     intermediate values                   peak")
        lines.append("micro_size  samples  predicted  measured  predicted  measured  fits")
        for row in self.rows:
            cells = (row.intermediate, row.intermediate_measured, row.peak, row.peak_measured)
            first, second, third, fourth = (_mb(cell) for cell in cells)
            lines.append(
                f"{row.micro_size:10}  {row.micro_batch_size:7}  {first:>9}  {second:>8}  {third:>9}  {fourth:>8}  "
                f"{'yes' if row.fits else 'no'}"
            )
        fits = "nothing fits" if self.fits_from is None else f"fits from micro_size={self.fits_from} on"
        return "\n".join([*lines, f"limit {_mb(self.memory_limit)} MB: {fits}"])


def _mb(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:.1f}"


def measured(
    cell: GradAccumulationCell,
    optimizer: nn.Optimizer,
    batch: Sequence[ms.Tensor],
    make_step: MakeStep,
    memory_limit: int | None,
    micro_sizes: Sequence[int] | None,
    measure: bool,
) -> MemoryReport:
    """What :func:`memory_report` returns; `make_step` makes the step of a trial."""
    check_trial(_NAME, cell, optimizer, batch, memory_limit)
    compatibility.check(REPORT, _NAME, Setup(cell.options, cell.network))
    numbers = _micro_sizes(micro_sizes, batch[0].shape[cell.first_axis])
    forecast = Forecast(_NAME, cell, optimizer, batch, make_step, memory_limit)
    _probe(forecast)
    probed = tuple(size for size, peak in sorted(forecast.measured.items()) if peak is not None)
    sizes = [-(-forecast.trials.samples // number) for number in numbers]  # descending
    predicted = {size: forecast.predict(size) for size in sizes}
    for size in sizes[::-1] if measure else ():
        if forecast.may_try(size):
            forecast.measure(size)
    exact = {
        "parameters": bytes_of(cell.network.get_parameters()),
        "optimizer_state": bytes_of(state_of(optimizer, cell)),
        "batch": sum(value.nbytes for value in batch),
    }
    known = {
        size: sum(exact.values()) + forecast.accumulators * forecast.accumulates(size) for size in (*probed, *sizes)
    }
    framework = max(0, forecast.after[probed[0]] - known[probed[0]]) if probed else 0
    rows = [
        _row(forecast, number, size, framework + known[size], predicted[size])
        for number, size in zip(numbers, sizes, strict=True)
    ]
    return MemoryReport(
        rank=rank_and_ranks()[0],
        what=forecast.trials.meter.what,
        accumulators=forecast.accumulators,
        framework=framework,
        memory_limit=forecast.limit,
        probed=probed,
        rows=tuple(rows),
        **exact,
    )


def _row(forecast: Forecast, micro_size: int, size: int, rest: int, predicted: int) -> MemoryRow:
    """`rest` : bytes of everything except intermediate values."""
    peak, measured = max(rest, predicted), forecast.measured.get(size)
    return MemoryRow(
        micro_size=micro_size,
        micro_batch_size=size,
        intermediate=peak - rest,
        intermediate_measured=None if measured is None else max(0, measured - rest),
        peak=peak,
        peak_measured=measured,
        fits=forecast.may_fit(size),
    )


def _probe(forecast: Forecast) -> None:
    """Measure sizes that double: 1, 2 and 4, and more up to a quarter of the batch, while two differ by no more than
    many times the noise."""
    most = max(4, forecast.trials.samples // 4)
    while (size := forecast.next_size()) is not None and size <= most:
        known = sorted(forecast.known().values())
        if len(known) > 2 and known[-1] - known[-2] > _ENOUGH:
            break
        forecast.measure(size)


def _micro_sizes(micro_sizes: Sequence[int] | None, samples: int) -> list[int]:
    if micro_sizes is None:
        return [1 << power for power in range(samples.bit_length())]
    for micro_size in micro_sizes:
        check_positive_int(_NAME, "micro_sizes", micro_size)
    if not micro_sizes or max(micro_sizes) > samples:
        raise ValueError(
            f"For '{_NAME}', the argument 'micro_sizes' must be numbers of micro-batches, at least one and none larger "
            f"than the batch, but got {list(micro_sizes)} and a batch of {samples} sample(s)."
        )
    return sorted(set(micro_sizes))


def check_trial(owner: str, cell: Any, optimizer: Any, batch: Sequence[Any], memory_limit: Any) -> None:
    """Raise one clear error before any trial."""
    check_optimizer(owner, cell, optimizer)
    refuse_without_kernels(owner, optimizer)
    compatibility.check(TRIAL, owner, Setup(cell.options, cell.network, compiler_distributes()))
    check_parallel_mode(owner)
    plan_split(batch_shapes(tuple(batch)), 1, None, cell.shared, cell.axis)
    if memory_limit is not None:
        check_positive_int(owner, "memory_limit", memory_limit)
