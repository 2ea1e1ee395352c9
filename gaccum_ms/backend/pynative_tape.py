"""PyNative mode's tape, the record for gradients, which stays open when an error interrupts a gradient.

MindSpore 2.10 then records all later operations on it: some optimizers write nothing at their next update, and after
the second such gradient, indexing a Tensor by an int fails, and so do some gradients.
"""

from __future__ import annotations

import mindspore as ms

from gaccum_ms.backend import pynative_executor


def close_tape() -> None:
    """Close the tape if an interrupted gradient left it open, or before an error interrupts one. After some errors of
    its kernels MindSpore has closed it itself."""
    if ms.get_context("mode") == ms.PYNATIVE_MODE and pynative_executor.grad_flag():
        pynative_executor.clear_res()
