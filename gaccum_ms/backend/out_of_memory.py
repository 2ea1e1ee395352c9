"""How MindSpore says that memory is not enough."""

from __future__ import annotations

from typing import Any

# In errors of MindSpore 2.10: of an allocation on CPU, of its pools on GPU and Ascend, of CUDA's libraries.
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
    """Whether an error says so: a MemoryError, Python's and NumPy's, or a RuntimeError in MindSpore's words. On CPU,
    where a system may also end the process, or MindSpore hang, rely on a limit that is not reached."""
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in _PHRASES)


def check_test(owner: str, test: Any) -> None:
    """Refuse what is given in place of `is_out_of_memory` and cannot be called."""
    if test is not None and not callable(test):
        raise TypeError(
            f"For '{owner}', the argument 'is_out_of_memory' must be a function of an error, but got {test!r}."
        )
