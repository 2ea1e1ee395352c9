"""PyNative mode's tape, the record for gradients, which stays open when an error interrupts a gradient.

MindSpore 2.10 then records later operations on it: after the second such gradient in a process, indexing a Tensor by an
int fails, and so do some gradients.
"""

from __future__ import annotations

import mindspore as ms

from gaccum_ms.backend import pynative_executor


def forget_interrupted_gradient(error: BaseException) -> None:
    """Close the tape after a Python error within an eager gradient. After a RuntimeError, which MindSpore's kernels
    raise, closing it would crash MindSpore."""
    if not isinstance(error, RuntimeError):
        close_tape()


def close_tape() -> None:
    """Close the tape, before Python code raises an error within an eager gradient."""
    if ms.get_context("mode") == ms.PYNATIVE_MODE:
        pynative_executor.clear_res()
