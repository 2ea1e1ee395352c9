"""The table of `memory_report` : what each number of micro-batches needs, before a training runs out of memory."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from gaccum_ms.memory.forecast import Forecast
from gaccum_ms.memory.trial import Trials, bytes_of
from gaccum_ms.options import compatibility
from gaccum_ms.options.rules import REPORT, Setup


@dataclass(frozen=True)
class MemoryRow:
    """The row of one number of micro-batches: `MemoryReport` explains the fields."""

    micro_size: int
    micro_batch_size: int
    peak: int
    measured: bool
    fits: bool


@dataclass(frozen=True)
class MemoryReport:
    r"""
    The result of :func:`memory_report` ; ``print(report)`` shows a table.

    All sizes are in bytes, on this rank. ``fits_from`` is the smallest number of micro-batches from which on all fit,
    or ``None`` .

    Args:
        parameters (int): The size of the parameters.
        optimizer_state (int): The size of the optimizer's state.
        accumulators (int): Present if there is more than one micro-batch.
        batch (int): The size of the batch.
        memory_limit (int): The limit.
        rows (tuple): For each number of micro-batches: ``micro_size`` , the number; ``micro_batch_size`` , the samples
            in each; ``peak`` , of everything; ``measured`` , whether it was run, otherwise the peak is predicted; and
            ``fits`` .

    Raises:
        TypeError: If a field is left out.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from gaccum_ms import MemoryReport
        >>> report = MemoryReport(400, 400, 400, 64, 20000, ())
        >>> print(report.fits_from)
        None
    """

    parameters: int
    optimizer_state: int
    accumulators: int
    batch: int
    memory_limit: int
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
        }
        lines = [f"{name:15}  {size / 1e6:9.1f} MB" for name, size in exact.items()]
        lines.append("micro_size  samples    peak MB             fits")
        for row in self.rows:
            lines.append(
                f"{row.micro_size:10}  {row.micro_batch_size:7}  {row.peak / 1e6:9.1f}  "
                f"{'measured' if row.measured else 'predicted':9}  {'yes' if row.fits else 'no'}"
            )
        fits = "nothing fits" if self.fits_from is None else f"fits from micro_size={self.fits_from} on"
        return "\n".join([*lines, f"limit {self.memory_limit / 1e6:.1f} MB: {fits}"])


def report_of(trials: Trials) -> MemoryReport:
    """Tries 1, 2, 4, ... micro-batches, from the smallest on."""
    compatibility.check(REPORT, trials.owner, Setup(trials.cell.options, trials.cell.network))
    forecast = Forecast(trials)
    numbers = [1 << power for power in range(trials.samples.bit_length())]
    sizes = [-(-trials.samples // number) for number in numbers]  # descending
    for size in reversed(sizes):
        if forecast.may_try(size):
            forecast.measure(size)
    rows = [
        MemoryRow(
            micro_size=number,
            micro_batch_size=size,
            peak=forecast.peak(size),
            measured=size in forecast.measured,
            fits=forecast.may_fit(size),
        )
        for number, size in zip(numbers, sizes, strict=True)
    ]
    return MemoryReport(
        parameters=bytes_of(trials.cell.network.get_parameters()),
        optimizer_state=bytes_of(trials.optimizer_state()),
        accumulators=trials.accumulators,
        batch=sum(value.nbytes for value in trials.batch),
        memory_limit=trials.limit,
        rows=tuple(rows),
    )
