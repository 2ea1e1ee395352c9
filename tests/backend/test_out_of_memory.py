"""The errors that mean that memory is not enough."""

from __future__ import annotations

import pytest

from gaccum_ms.backend.out_of_memory import is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),  # NumPy's are a kind of it
        RuntimeError("std::bad_alloc"),
        RuntimeError("Memory not enough: Alloc device memory[1024] failed."),
        RuntimeError("Device(id:0) memory isn't enough and alloc failed, kernel name: x, alloc size: 1B."),
    ],
    ids=str,
)
def test_what_mindspore_says(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("out of memory"), KeyboardInterrupt()])
def test_other_errors(error):
    assert not is_out_of_memory(error)
