"""The rows of a batch, and micro-batches of some of these rows, trimmed to a width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np

from gaccum_ms.splitting.token_plan import NOBODY


class Rows(NamedTuple):
    """A batch."""

    arrays: list[np.ndarray]  # the inputs; axis 0 counts samples
    axes: list[Sequence[int]]  # of each input, those that are trimmed
    fillers: tuple[Any, ...]  # the padding value of each input
    lengths: np.ndarray  # of the samples, at least 1
    before: int  # the width to which the batch is padded

    def micro_batch(self, samples: np.ndarray, width: int) -> tuple[ms.Tensor, ...]:
        """The inputs of a micro-batch of these samples, trimmed or padded to a width."""
        real, present = samples != NOBODY, min(width, self.before)
        inputs = []
        for array, trimmed, filler in zip(self.arrays, self.axes, self.fillers, strict=True):
            slices = [slice(present) if axis in trimmed else slice(None) for axis in range(1, array.ndim)]
            shape = tuple(width if axis in trimmed else size for axis, size in enumerate(array.shape))
            taken = np.full((samples.size, *shape[1:]), filler, array.dtype)
            target, source = (real, *slices), (samples[real], *slices)
            taken[target] = array[source]
            inputs.append(ms.Tensor(taken))
        return tuple(inputs)
