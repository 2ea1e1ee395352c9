"""The numbers of tokens that are worth trying for a batch, and the largest micro-batches that a number allows."""

from __future__ import annotations

from typing import Any

import numpy as np

from gaccum_ms.splitting.splitter import MicroBatches, OfFunction, Splitter
from gaccum_ms.splitting.token_plan import NOBODY
from gaccum_ms.splitting.token_rows import Rows


class _Trial(OfFunction):
    joins = False


class WorstCase:
    """The numbers are multiples of the largest width: others would leave a part of its micro-batches unused."""

    def __init__(self, rows: Rows, widths: tuple[int, ...]) -> None:
        self._rows = rows
        self.widths = widths
        self.multiple_of = widths[-1]
        # With this many, all samples of each width fit into one micro-batch: more tokens would only add padding.
        samples = np.bincount(np.searchsorted(widths, rows.lengths), minlength=len(widths))
        self.most = max(1, -(-int((samples * widths).max()) // self.multiple_of))  # multiples

    def of(self, tokens: int) -> Splitter:
        """Returns a full micro-batch of each width, made of this batch's samples. A smaller width may
        need more memory: it has more rows."""

        def micro_batches(*_: Any) -> MicroBatches:
            return [self._rows.micro_batch(self._samples(width, tokens // width), width) for width in self.widths]

        return _Trial(micro_batches)

    def _samples(self, width: int, number: int) -> np.ndarray:
        """The samples that the width holds, from the longest to the shortest, repeated up to this number."""
        lengths = self._rows.lengths
        fitting = np.flatnonzero(lengths <= width)
        return np.resize(fitting[np.argsort(-lengths[fitting])] if fitting.size else [NOBODY], number)
