"""Parameters in which a compiled step keeps numbers: for callbacks to read, and for checkpoints to hold."""

from __future__ import annotations

import mindspore as ms
import numpy as np


def record(name: str, shape: tuple[int, ...] = (), value: float = 0.0) -> ms.Parameter:
    """A float32 number, or several."""
    return ms.Parameter(ms.Tensor(np.full(shape, value, np.float32)), name=name, requires_grad=False)


def counter(name: str, value: int = 0) -> ms.Parameter:
    """An int32 number, shape ``()``."""
    return ms.Parameter(ms.Tensor(value, ms.int32), name=name, requires_grad=False)
