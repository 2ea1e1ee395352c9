"""Predicts a training step's peak memory for micro-batches of any size, from a few small ones.

Intermediate values and most workspace grow linearly with the samples, above a constant part: code, and workspace that
kernels choose. This choice depends on the size, most of all between one sample and two, where oneDNN uses other
algorithms. So sizes between two measured ones are interpolated, and larger sizes are extrapolated from the two largest
measured ones.

A batch that is one micro-batch has a graph without loop and slices, and a separate line.
"""

from __future__ import annotations

from collections.abc import Mapping

_ENOUGH = 50_000_000  # bytes between two measurements; many times the noise of one
_FIRST = (1, 2, 4, 16)


def next_probe(measured: Mapping[int, int], samples: int) -> int | None:
    """The size to measure next, or None. Measure 1, 2, 4 and 16 samples; then quadruple while two successive
    measurements differ by less than the noise, up to a quarter of the batch. `measured` : bytes by samples."""
    known = sorted(measured.items())
    largest = known[-1][0] if known else 0
    if largest < _FIRST[-1]:
        size = next(size for size in _FIRST if size > largest)
        return size if size <= samples else None
    little = known[-1][1] - known[-2][1] < _ENOUGH
    return 4 * largest if little and 4 * largest <= -(-samples // 4) else None


def predict(measured: Mapping[int, int], size: int) -> int:
    """Bytes at the peak. `measured` : bytes by samples, at least one entry."""
    known = sorted(measured.items())
    if len(known) == 1:
        return known[0][1]
    above = next((index for index, (samples, _) in enumerate(known) if samples >= size), len(known) - 1)
    (few, less), (many, more) = known[max(1, above) - 1], known[max(1, above)]
    per_sample = max(0.0, (more - less) / (many - few))
    return round(more + (size - many) * per_sample)
