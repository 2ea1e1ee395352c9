"""The C library's heap, in separate processes that do not import MindSpore."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from tests.support import paths

HEAPS = """
import ctypes, runpy, sys, threading

library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.open_memstream.restype = ctypes.c_void_p
if sys.argv[2] == "small":
    runpy.run_path(sys.argv[1])["keep_heap_small"]()
have, ready = threading.Barrier(5), threading.Event()

def thread():
    library.malloc(1000)
    have.wait()
    ready.wait()

for _ in range(4):
    threading.Thread(target=thread).start()
have.wait()
text, length = ctypes.c_char_p(), ctypes.c_size_t()
file = ctypes.c_void_p(library.open_memstream(ctypes.byref(text), ctypes.byref(length)))
library.malloc_info(0, file)
library.fclose(file)
ready.set()
print(text.value.decode().count("<heap nr="))
"""


def heaps(kind: str) -> int:
    """The number of heaps after four threads have allocated, the main heap included."""
    command = [sys.executable, "-c", HEAPS, str(paths.ROOT / "gaccum_ms/memory/heap.py"), kind]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="the C library is not glibc")
def test_all_threads_share_one_heap():
    assert heaps("small") == 1
    assert heaps("as it is") > 1
