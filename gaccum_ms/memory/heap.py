"""The C library's heap, on CPU: one heap for all threads, which returns freed memory to the system at once.

glibc creates a heap for each thread, and allocates large blocks directly from the system. Both make the peak larger,
and different each time:

* One thread does not reuse memory that another has freed in its heap, and the assignment of kernels to threads is
  random: the peak of a U-Net's training was 654 to 664 MiB in six processes, and 642 MiB in each of five with one heap.
* The threshold for large blocks begins at 128 KiB and rises with each large block that is freed, up to 32 MiB. Then
  most intermediate values are in heaps, whose free memory stays with the process: a fifth of the peak. A threshold
  that is set explicitly does not rise.
"""

from __future__ import annotations

import ctypes

_LARGE = 128 * 1024  # bytes: glibc's initial threshold
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # from malloc.h


def keep_heap_small() -> None:
    """Use one heap from now on, and return free memory to the system. Nothing is done if the C library is not glibc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and hasattr(library, "malloc_trim"):
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        library.mallopt(_M_ARENA_MAX, 1)  # applies to threads without a heap so far
        library.malloc_trim(0)
