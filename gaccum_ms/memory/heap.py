"""The C library's heap, on CPU: one for all threads, which gives back what MindSpore frees at once.

glibc makes a heap for each thread and serves large blocks directly from the system. Both make a peak larger, and
different each time:

* What one thread has freed in its heap, another does not use. Which thread runs which kernel is left to chance: the
  peak of a U-Net's training was 654 to 664 MiB in six processes, and 642 MiB in each of five with one heap.
* "Large" begins at 128 KiB and rises with each large block that is freed, up to 32 MiB. From then on most intermediate
  values lie in heaps, and what is free there stays with the process: a fifth of the peak. A threshold that is set does
  not rise.
"""

from __future__ import annotations

import ctypes

_LARGE = 128 * 1024  # bytes: glibc's own, to begin with
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of malloc.h


def keep_heap_small() -> None:
    """From now on; what is free already is given back. Where the C library is not glibc, nothing."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and hasattr(library, "malloc_trim"):
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        library.mallopt(_M_ARENA_MAX, 1)  # for threads that have no heap yet
        library.malloc_trim(0)
