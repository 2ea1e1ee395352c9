"""A trial of a number of tokens, for a cell that splits by `MaxTokens` : it trains on a full micro-batch of each width,
and updates. A size is a multiple of the largest width.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms

from gaccum_ms.memory.trial import Trials


class TokenTrials(Trials):
    """Tries sizes of micro-batches, in tokens."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._worst = self.cell.split.worst_case(*self.batch)
        self.most, self.multiple_of = self._worst.most, self._worst.multiple_of

    @property
    def sizes(self) -> list[int]:
        return list(range(1, self.most + 1))

    def is_ragged(self, size: int) -> bool:
        return False

    def _first(self, step: Any, size: int, samples: int) -> list[ms.Tensor]:
        return list(self.batch)

    def _options(self, size: int) -> dict[str, Any]:
        return {"split": self._cut(size)}

    def _cut(self, size: int) -> Any:
        return self._worst.of(size * self.multiple_of)
