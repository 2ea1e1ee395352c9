"""What a training step will reach with micro-batches of any size, from a few small ones.

Intermediate values and most workspace grow with the samples, by the same number of bytes for each, above a constant
part: code, and what kernels choose to have. That choice depends on the size, most of all between one sample and two
(oneDNN takes other algorithms), so the line is drawn through the two largest that were measured, and between two that
were measured through these.

A batch that is one micro-batch has a graph without a loop and without slices, and a line of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

_ENOUGH = 50_000_000  # bytes between two measurements, many times what one varies by
_FIRST = (1, 2, 4, 16)


def next_probe(measured: Mapping[int, int], samples: int) -> int | None:
    """The size to measure next, or None. Measure 1, 2, 4 and 16 samples; then quadruple while two successive
    measurements differ by less than the noise, up to a quarter of the batch.

    Args:
        measured (Mapping[int, int]): Samples, and the bytes that they reached.
        samples (int): The most that may be measured: those of the batch, or one less.
    """
    known = sorted(measured.items())
    largest = known[-1][0] if known else 0
    if largest < _FIRST[-1]:
        size = next(size for size in _FIRST if size > largest)
        return size if size <= samples else None
    little = known[-1][1] - known[-2][1] < _ENOUGH
    return 4 * largest if little and 4 * largest <= -(-samples // 4) else None


def predict(measured: Mapping[int, int], size: int) -> int:
    """Bytes at the peak.

    Args:
        measured (Mapping[int, int]): Samples, and the bytes that they reached. One entry at least.
        size (int): Samples of a micro-batch.
    """
    known = sorted(measured.items())
    if len(known) == 1:
        return known[0][1]
    above = next((index for index, (samples, _) in enumerate(known) if samples >= size), len(known) - 1)
    (few, less), (many, more) = known[max(1, above) - 1], known[max(1, above)]
    per_sample = max(0.0, (more - less) / (many - few))
    return round(more + (size - many) * per_sample)
