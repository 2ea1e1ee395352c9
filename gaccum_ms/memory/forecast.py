"""The memory of a training step for each size of micro-batches: measured for some sizes, predicted for others.

Intermediate values grow linearly with the samples of a micro-batch, above a constant part: code, weights, and workspace
that kernels choose. So sizes are tried that double, and a straight line through two neighbours says what others need:
sizes between them, or, through the two largest, larger ones. A size is tried only if it is predicted to fit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

from gaccum_ms.backend.out_of_memory import is_out_of_memory
from gaccum_ms.memory.trial import Trials

_SPARE = 0.015  # of the limit: by how much two trainings of the same size may differ
_GAIN = 0.85  # a ragged size is tried only if what fits is a smaller part of it


class Forecast:
    """Measures sizes, and predicts others. `fails` : whether an error means that memory is not enough; a MemoryError
    always does."""

    def __init__(self, trials: Trials, fails: Callable[[BaseException], bool] = is_out_of_memory) -> None:
        self.trials = trials
        self._fails = fails
        self.measured: dict[int, int] = {}  # by size, bytes at the peak
        self.failed: list[int] = []  # sizes
        self._copied = 0  # bytes that a trial needs in addition

    def measure(self, size: int) -> None:
        """Try the size."""
        try:
            self.measured[size], copied = self.trials.run(size)
            self._copied = max(self._copied, copied)
        except Exception as error:
            if not self._fails(error):
                raise
            self.failed.append(size)

    def peak(self, size: int) -> int:
        """The measured or predicted bytes: 0 before the first trial; the limit, if all have failed. A smaller last
        micro-batch is in the graph beside its loop, and has its own memory: the sizes with one have their own line."""
        if size in self.measured:
            return self.measured[size]
        if not self.measured:
            return self.trials.limit if self.failed else 0
        alike: dict[int, int] = {}
        others: dict[int, int] = {}
        for other, peak in self.measured.items():
            peaks = alike if self._is_ragged(other) == self._is_ragged(size) else others
            peaks[other] = peak - self.trials.accumulators_of(other)
        if len(alike) > 1 or not others:
            line = self._on_line(alike, size)
        else:
            beside = sum(peak - self._on_line(others, other) for other, peak in alike.items())
            line = self._on_line(others, size) + beside
        return line + self.trials.accumulators_of(size)

    def _on_line(self, peaks: Mapping[int, int], size: int) -> int:
        """Bytes by a line through two neighbours, or the two largest sizes."""
        load = self.trials.samples_in_graph
        line = sorted({load(other): peak for other, peak in peaks.items()}.items())
        if len(line) == 1:
            return line[0][1]
        pairs = itertools.pairwise(line)
        (few, small), (many, large) = next((pair for pair in pairs if load(size) <= pair[1][0]), line[-2:])
        return round(large + (load(size) - many) * max(0, large - small) / (many - few))

    def _is_ragged(self, size: int) -> bool:
        """Whether the last micro-batch is smaller."""
        return self.trials.samples_in_graph(size) > size

    def _keeps(self, peak: int) -> bool:
        """Whether a training with a peak of so many bytes keeps the limit."""
        return peak <= self.trials.limit * (1 - _SPARE)

    def may_fit(self, size: int) -> bool:
        """Whether its peak is within the limit, and no size failed that needs less."""
        load = self.trials.samples_in_graph
        fails = any(other <= size and load(other) <= load(size) for other in self.failed)
        return not fails and self._keeps(self.peak(size))

    def may_try(self, size: int) -> bool:
        """Whether a size may fit, and its trial too."""
        return self.may_fit(size) and self.peak(size) + self._copied <= self.trials.limit

    def found(self) -> int:
        """The largest size that fits; 0 if none does. It was measured, or is predicted from half of it, where only the
        trial would have needed too much."""
        largest = self._largest()
        predicted = [
            size
            for size in self.trials.sizes
            if size <= 2 * largest and size not in self.measured and not self._is_ragged(size) and self.may_fit(size)
        ]
        return max([largest, *predicted])

    def _largest(self) -> int:
        """The largest measured size that fits; 0 if none does."""
        return max((size for size, peak in self.measured.items() if self._keeps(peak)), default=0)

    def next_size(self) -> int | None:
        """The size to try next; None: no size is left. It is the largest that may fit of up to twice the largest
        measured one. After a failure, the line is known to be wrong, and what is left is bisected. Sizes without a
        smaller last micro-batch come first, because they need less."""
        largest = self._largest()
        left = [size for size in self.trials.sizes if size > largest and self.may_try(size)]
        without = [size for size in left if not self.trials.accumulators_of(size)]
        near = [size for size in left if size <= max(1, 2 * largest)] or without
        near = [size for size in near if not self._is_ragged(size)] or [size for size in near if _GAIN * size > largest]
        failed = self.failed or not all(map(self._keeps, self.measured.values()))
        return near[len(near) // 2 if failed else -1] if near else None
