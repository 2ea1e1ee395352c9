"""Which numbers of tokens are worth trying for a batch, and the largest micro-batches that come of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np

from gaccum_ms.tokens.plan import NOBODY
from gaccum_ms.tokens.rows import Rows


class WorstCase:
    """Numbers that are multiples of the largest width: others would leave a part of its micro-batches unused.

    Args:
        rows (Rows): The batch.
        widths (tuple[int, ...]): The widths, ascending.
    """

    def __init__(self, rows: Rows, widths: tuple[int, ...]) -> None:
        self._rows = rows
        self.widths = widths
        self.unit = widths[-1]
        # With these, all samples of each width are one micro-batch: of more tokens only padding would come.
        samples = np.bincount(np.searchsorted(widths, rows.lengths), minlength=len(widths))
        self.most = max(1, -(-int((samples * widths).max()) // self.unit))  # multiples

    def of(self, tokens: int) -> Callable[..., list[tuple[ms.Tensor, ...]]]:
        """What makes of this batch a full micro-batch of each width. A smaller width is not always less: a kernel may
        need more for more rows."""

        def micro_batches(*_: Any) -> list[tuple[ms.Tensor, ...]]:
            return [self._rows.micro_batch(self._samples(width, tokens // width), width) for width in self.widths]

        return micro_batches

    def _samples(self, width: int, number: int) -> np.ndarray:
        """The longest that such a micro-batch may hold, over and over."""
        lengths = self._rows.lengths
        fitting = np.flatnonzero(lengths <= width)
        return np.resize(fitting[np.argsort(-lengths[fitting])] if fitting.size else [NOBODY], number)
