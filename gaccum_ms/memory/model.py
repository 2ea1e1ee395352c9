"""What a micro-step of any size will use, from a few small ones.

Intermediate values and most workspace grow with the samples, by the same number of bytes for each, above a constant
part: code, and what kernels choose to have. That choice depends on the size, most of all between one sample and several
(oneDNN takes other algorithms), so the line is drawn through the two largest that were measured, and between two that
were measured through these.
"""

from __future__ import annotations

from collections.abc import Mapping

_ENOUGH = 50_000_000  # bytes between two measurements, many times what one varies by


def next_probe(measured: Mapping[int, int], samples: int) -> int | None:
    """The size to measure next, or None: 1, 4 and 16 samples, and on by fours while so little is between two that the
    line through them would be one through noise, but no more than a quarter of the batch.

    Args:
        measured (Mapping[int, int]): Samples, and the bytes that they used.
        samples (int): Of the batch.
    """
    known = sorted(measured.items())
    if not known:
        return 1
    largest = known[-1][0]
    if largest < 16:
        size = 4 if largest < 4 else 16
        return size if size <= samples else samples if largest == 1 < samples else None
    little = len(known) < 2 or known[-1][1] - known[-2][1] < _ENOUGH
    return 4 * largest if little and 16 * largest <= samples else None


def predict(measured: Mapping[int, int], size: int) -> int:
    """Bytes of intermediate values and workspace in a micro-step.

    Args:
        measured (Mapping[int, int]): Samples, and the bytes that they used. One entry at least.
        size (int): Samples of the micro-step.
    """
    known = sorted(measured.items())
    if len(known) == 1:  # all of it may grow with the samples
        return known[0][1] * -(-size // known[0][0])
    above = next((index for index, (samples, _) in enumerate(known) if samples >= size), len(known) - 1)
    (few, less), (many, more) = known[max(1, above) - 1], known[max(1, above)]
    per_sample = max(0.0, (more - less) / (many - few))
    return round(more + (size - many) * per_sample)
