"""The memory of a training step for each size of micro-batches: measured for some sizes, predicted for others.

Intermediate values grow linearly with the samples of a micro-batch, above a constant part: code, weights, and workspace
that kernels choose. So sizes are tried that double, and a straight line through two neighbours says what others need:
sizes between them, or, through the two largest, larger ones. A size is tried only if it is predicted to fit.

A batch that is one micro-batch has a graph without loop, and no accumulators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import mindspore as ms
from mindspore import nn

from gaccum_ms.backend.out_of_memory import is_out_of_memory
from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.memory.child import TooMuchMemory
from gaccum_ms.memory.trial import MakeStep, Trials

_SPARE = 0.015  # of the limit: by how much two trainings of the same size may differ
_GAIN = 0.85  # a ragged size is tried only if what fits is a smaller part of it


class Forecast:
    """Measures sizes, and predicts others. `fails` : whether an error means that memory is not enough."""

    def __init__(
        self,
        owner: str,
        cell: GradAccumulationCell,
        optimizer: nn.Optimizer,
        batch: Sequence[ms.Tensor],
        make_step: MakeStep,
        memory_limit: int | None = None,
        fails: Callable[[BaseException], bool] = is_out_of_memory,
    ) -> None:
        self.trials = Trials(owner, cell, optimizer, batch, make_step, memory_limit)
        self.limit = self.trials.limit
        self._fails = fails
        compensation = 4 if cell.accumulators.compensated else 0  # bytes
        self.accumulators = sum(
            parameter.size * (ms.Tensor(0, cell.accumulators.dtype or parameter.dtype).itemsize + compensation)
            for parameter in optimizer.parameters
        )
        self._always_accumulates = any(
            (cell.accumulation_steps > 1, cell.counted, cell.several_losses, cell.finds_size)
        )
        self.measured: dict[int, int | None] = {}  # by size, bytes at the peak; None: it did not fit
        self.after: dict[int, int] = {}  # by size, bytes after the trial
        self._copied = 0  # bytes that a trial needs in addition
        self._reached = 0  # bytes of a trial that did not fit

    def measure(self, size: int) -> int | None:
        """Bytes at the peak; None: the size did not fit."""
        if size in self.measured:
            return self.measured[size]
        self.measured[size] = None
        try:
            self.measured[size], self.after[size], copied = self.trials.run(size)
            self._copied = max(self._copied, copied)
        except Exception as error:
            if not isinstance(error, TooMuchMemory) and not self._fails(error):
                raise
            self._reached = max(self.limit, getattr(error, "reached", 0))
        return self.measured[size]

    def predict(self, size: int) -> int:
        """The predicted bytes at the peak."""
        known = self.known()
        if not known:
            return self.measured.get(size) or self._reached
        alike = {other: peak for other, peak in known.items() if self._is_ragged(other) == self._is_ragged(size)}
        others = {other: peak for other, peak in known.items() if other not in alike}
        less = 0 if self.accumulates(size) else self.accumulators
        if len(alike) > 1 or not others:
            return self._on_line(alike, size) - less
        beside = [peak - self._on_line(others, other) for other, peak in alike.items()]
        return self._on_line(others, size) + sum(beside) - less

    def _on_line(self, peaks: Mapping[int, int], size: int) -> int:
        """Bytes by a line through two neighbours, or the two largest sizes. A smaller last micro-batch is in the graph
        beside its loop, and has its own memory."""
        load = self.trials.samples_in_graph
        line = sorted({load(other): peak for other, peak in peaks.items()}.items())
        if len(line) == 1:
            return line[0][1]
        above = next((index for index, (samples, _) in enumerate(line) if samples >= load(size)), len(line) - 1)
        (few, small), (many, large) = line[max(1, above) - 1], line[max(1, above)]
        return round(large + (load(size) - many) * max(0, large - small) / (many - few))

    def _is_ragged(self, size: int) -> bool:
        return self.trials.samples_in_graph(size) > size

    def known(self) -> dict[int, int]:
        """Of the sizes that were measured with accumulators, bytes at the peak."""
        return {size: peak for size, peak in self.measured.items() if peak is not None and self.accumulates(size)}

    def accumulates(self, size: int) -> bool:
        """Whether the training with this size has accumulators."""
        return self._always_accumulates or size < self.trials.samples

    def keeps(self, peak: int) -> bool:
        """Whether a training with a peak of so many bytes keeps the limit."""
        return peak <= self.limit * (1 - _SPARE)

    def may_fit(self, size: int) -> bool:
        """Whether the measured peak, else the predicted one, is within the limit, and no size failed that needs
        less."""
        load = self.trials.samples_in_graph
        failed = [other for other, peak in self.measured.items() if peak is None]
        if any(
            other <= size and load(other) <= load(size) and self._is_ragged(other) <= self._is_ragged(size)
            for other in failed
        ):
            return False
        peak = self.measured.get(size)
        return self.keeps(self.predict(size) if peak is None else peak)

    def may_try(self, size: int) -> bool:
        """Whether a size may fit, and its trial too."""
        return self.may_fit(size) and self.predict(size) + self._copied <= self.limit

    def found(self) -> int:
        """The largest size that fits; 0 if none does. It was measured, or is predicted from half of it, where only the
        trial would have needed too much."""
        largest = self.largest()
        return max(
            size
            for size in (largest, *self.trials.sizes)
            if size == largest
            or (size <= 2 * largest and size not in self.measured and self.may_fit(size) and not self._is_ragged(size))
        )

    def largest(self) -> int:
        """The largest measured size that fits; 0 if none does."""
        return max((size for size, peak in self.measured.items() if peak is not None and self.keeps(peak)), default=0)

    def next_size(self) -> int | None:
        """The size to try next; None: no size is left. It is the largest that may fit of up to twice the largest
        measured one. After a failure, the line is known to be wrong, and what is left is bisected. Sizes without a
        smaller last micro-batch come first, because they need less. A small one shows what such a micro-batch adds."""
        sizes, largest = self.trials.sizes, self.largest()
        left = [size for size in sizes if size > largest and size not in self.measured and self.may_try(size)]
        whole = [size for size in left if not self.accumulates(size)]
        near = [size for size in left if size <= max(1, 2 * largest)] or whole
        near = [size for size in near if not self._is_ragged(size)] or [size for size in near if _GAIN * size > largest]
        if not near:
            return None
        ragged = [size for size in sizes if self._is_ragged(size)]
        if near[0] in ragged and not any(size in self.measured for size in ragged):
            return ragged[0]
        failed = any(peak is None or not self.keeps(peak) for peak in self.measured.values())
        return near[len(near) // 2 if failed else -1]
