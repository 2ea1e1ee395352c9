"""Recognises MindSpore's errors for insufficient memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# From errors of MindSpore 2.10: allocations on CPU, memory pools on GPU and Ascend, CUDA's libraries.
_PHRASES = (
    "bad_alloc",
    "out of memory",
    "memory not enough",
    "memory isn't enough",
    "allocate memory failed",
    "allocate device memory failed",
    "alloc failed, size",
    "cudamalloc failed",
    "malloc for kernel",
    "malloc mem from mem pool failed",
    "somas allocate failed",
    "dynamic workspace memory failed",
    "cublas_status_alloc_failed",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means this: a MemoryError of Python or NumPy, or a RuntimeError with one of MindSpore's phrases.
    On CPU the system may kill the process instead, or MindSpore may hang: stay below the limit there."""
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in _PHRASES)


def memory_test(test: Callable[[BaseException], bool] | None) -> Callable[[BaseException], bool]:
    """`is_out_of_memory` , or the user's test in its place; a MemoryError means it in any case."""
    if test is None:
        return is_out_of_memory
    return lambda error: isinstance(error, MemoryError) or test(error)


def check_test(owner: str, test: Any) -> None:
    """Refuse a replacement of `is_out_of_memory` that cannot be called."""
    if test is not None and not callable(test):
        raise TypeError(
            f"For '{owner}', the argument 'is_out_of_memory' must be a function of an error, but got {test!r}."
        )
