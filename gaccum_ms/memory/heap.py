"""The heap of this process, on CPU: what MindSpore frees goes back to the system at once.

glibc takes large blocks from the system and gives them back when they are freed; what "large" is begins at 128 KiB, and
rises with each such block that is freed, up to 32 MiB. From then on most of a network's intermediate values lie in the
heaps of several threads, and what is free there stays with the process: a fifth of the peak, another one in each run.
A threshold that somebody sets does not rise.
"""

from __future__ import annotations

import ctypes

_LARGE = 128 * 1024  # bytes: glibc's own, to begin with
_M_MMAP_THRESHOLD = -3  # of malloc.h


def give_back_freed_memory() -> None:
    """From now on, and what is free already. Where the C library is not glibc, nothing."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and hasattr(library, "malloc_trim"):
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        library.malloc_trim(0)
