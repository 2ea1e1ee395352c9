"""What PyNative mode records to differentiate, and does not forget when an error ends it.

MindSpore 2.10 then takes what comes next for a part of it: after the second such gradient in a process, indexing a
Tensor by an int fails, and so do some gradients.
"""

from __future__ import annotations

import mindspore as ms

from gaccum_ms.backend import pynative_executor


def forget_interrupted_gradient(error: BaseException) -> None:
    """Close the tape, after an error that Python has raised within an eager gradient. After one of MindSpore's own
    kernels, a RuntimeError, MindSpore does not survive its being closed."""
    if not isinstance(error, RuntimeError):
        close_tape()


def close_tape() -> None:
    """Before Python itself ends an eager gradient by an error."""
    if ms.get_context("mode") == ms.PYNATIVE_MODE:
        pynative_executor.clear_res()
