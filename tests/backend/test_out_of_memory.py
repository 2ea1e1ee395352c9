"""The errors that mean that memory is not enough."""

from __future__ import annotations

from gaccum_ms.backend.out_of_memory import is_out_of_memory

ERRORS = [
    MemoryError(),  # NumPy's are a kind of it
    RuntimeError("std::bad_alloc"),
    RuntimeError("Memory not enough: Alloc device memory[1024] failed."),
    RuntimeError("Device(id:0) memory isn't enough and alloc failed, kernel name: x, alloc size: 1B."),
]
OTHERS = [RuntimeError("shapes differ"), ValueError("out of memory"), KeyboardInterrupt()]


def test_what_mindspore_says():
    assert list(filter(is_out_of_memory, ERRORS + OTHERS)) == ERRORS
