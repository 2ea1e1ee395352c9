"""Which samples are evaluated: a few, chosen to differ; or micro-batches that training makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import ops

from gaccum_ms.splitting.even_split import UNCUT

_FLOATS = (ms.float16, ms.float32, ms.float64)
_MOST_READ = 4096  # entries of a sample


def joined(parts: Sequence[Sequence[Any]], axes: Sequence[int]) -> list[Any]:
    """Parts as one batch."""
    return [
        values[0] if axis == UNCUT else ops.concat(values, axis)
        for values, axis in zip(zip(*parts, strict=True), axes, strict=True)
    ]


def few(inputs: Sequence[Any], axes: Sequence[int], most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Choices of few samples, in two parts of different lengths, that differ in zeros, ignored labels, masks and
    classes; the later choices are for losses that are NaN. `most` : the samples of both."""
    samples = inputs[0].shape[axes[0]]
    order = np.argsort(_scores(inputs, axes, samples), kind="stable")
    room = min(samples, most)
    first, second = (2, 3) if room >= 5 else (1, 2) if room >= 3 else (1, 1)
    if first == 2:
        yield order[[0, (samples - second) // 2]], order[-second:]
        yield order[[0, -1]], order[[samples // 2, -2, 1]] if samples > 6 else order[1:-1][:second]
    yield order[:first], order[-second:]
    if second == 2:  # what the first sample lacks, as labels, another one of its part may have
        yield order[[-1]], order[[0, -2]]
    yield np.arange(first), np.arange(first, first + second)


def _scores(inputs: Sequence[Any], axes: Sequence[int], samples: int) -> np.ndarray:
    """A number for each sample; those of samples that a loss may weigh differently are far apart."""
    scores = np.zeros(samples)
    for value, axis in zip(inputs, axes, strict=True):
        if axis == UNCUT or value.size > _MOST_READ * samples or value.dtype == ms.bfloat16:
            continue
        entries = np.moveaxis(value.asnumpy(), axis, 0).reshape(samples, -1).astype(float)
        if value.dtype in _FLOATS:
            score = (entries == 0).sum(1) if (entries == 0).any() else entries.sum(1) * 1e-3
        else:
            score = (entries <= 0).sum(1) if entries.shape[1] > 1 else entries[:, 0]
        if np.isfinite(score).all():
            scores += score / max(float(np.ptp(score)), 1e-30)
    return scores


def are_rows_of(parts: Sequence[Sequence[Any]], inputs: Sequence[Any]) -> bool:
    """Whether parts are the samples of a batch, in any order, and nothing else."""
    if any(len(part) != len(inputs) for part in parts) or not all(isinstance(value, ms.Tensor) for value in inputs):
        return False
    samples = [[row for part in cut for row in zip(*map(_rows, part), strict=False)] for cut in ([inputs], parts)]
    return sorted(samples[0]) == sorted(samples[1])


def _rows(value: ms.Tensor) -> list[bytes]:
    """The samples, as bytes."""
    return [row.tobytes() for row in np.atleast_1d(value.astype(ms.float32).asnumpy())]
