"""AutoSize: asks the training to find how much fits into a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gaccum_ms.backend.out_of_memory import check_test
from gaccum_ms.checks.arguments import check_positive_int


@dataclass(frozen=True)
class AutoSize:
    r"""
    Let the training find the largest micro-batch that fits into memory, at its first batch, as
    :func:`find_micro_batch_size` does. If memory runs out later, all ranks go on with half the size, from the same
    batch on. It is the `micro_batch_size` of a :class:`GradAccumulationCell` , or the `max_tokens` of a
    :class:`MaxTokens` ; ``"auto"`` is short for ``AutoSize()`` .

    Args:
        memory_limit (int, optional): This rank's memory limit in bytes, as in :func:`find_micro_batch_size` .
            Default: ``None`` , the available memory.
        is_out_of_memory (Callable, optional): A function of an error: whether it means that memory is not enough, as a
            MemoryError always does. Default: ``None`` , RuntimeError with a message of MindSpore's allocators.

    Raises:
        TypeError: If `memory_limit` is not an int, or `is_out_of_memory` not callable.
        ValueError: If `memory_limit` is less than 1.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import nn
        >>> from gaccum_ms import AutoSize, GradAccumulationCell
        >>> network = nn.WithLossCell(nn.Dense(3, 1), nn.MSELoss())
        >>> cell = GradAccumulationCell(network, micro_batch_size=AutoSize(memory_limit=8_000_000_000))
    """

    memory_limit: int | None = None
    is_out_of_memory: Callable[[BaseException], bool] | None = None

    def __post_init__(self) -> None:
        if self.memory_limit is not None:
            check_positive_int("AutoSize", "memory_limit", self.memory_limit)
        check_test("AutoSize", self.is_out_of_memory)


def auto_size_of(size: object) -> object:
    """AutoSize() for ``"auto"`` ; everything else as it is."""
    return AutoSize() if isinstance(size, str) and size == "auto" else size


def check_micro_batch_size(owner: str, name: str, value: Any) -> None:
    if value is not None and not isinstance(value, AutoSize):
        check_positive_int(owner, name, value)
