"""Choose the widths to compile for: the ones with the least padding, found exactly by dynamic programming."""

from __future__ import annotations

import numpy as np


def best_widths(lengths: np.ndarray, number: int, largest: int | None = None) -> tuple[int, ...]:
    """At most `number` widths, ascending, with the fewest tokens when each length is padded to the smallest width that
    holds it.

    The last width is the largest length, or `largest` if that is larger. Each other width is a length that occurs: a
    different width could shrink to the next length below it. With the lengths sorted, the best `k` widths for the first
    `j` lengths are the best `k - 1` widths for the first `i` lengths and one more width, for the best `i` .
    """
    values, times = np.unique(lengths, return_counts=True)
    if largest is not None and largest > values[-1]:
        values, times = np.append(values, largest), np.append(times, 0)
    before = np.concatenate([[0], np.cumsum(times)])  # the number of samples with the first j values
    tokens = np.full(len(values) + 1, np.inf)  # for the first j values, with one width per iteration so far
    tokens[0] = 0
    begins: list[np.ndarray] = []  # for each iteration and j: the number of values below those of the last width
    for _ in range(min(number, len(values))):
        with_one_more = np.full_like(tokens, np.inf)
        begin = np.zeros(len(values) + 1, int)
        for j in range(1, len(values) + 1):
            candidates = tokens[:j] + values[j - 1] * (before[j] - before[:j])
            begin[j] = np.argmin(candidates)
            with_one_more[j] = candidates[begin[j]]
        tokens = with_one_more
        begins.append(begin)
    widths: list[int] = []
    left = len(values)
    for begin in begins[::-1]:
        if left:
            widths.append(int(values[left - 1]))
            left = int(begin[left])
    return tuple(widths[::-1])
