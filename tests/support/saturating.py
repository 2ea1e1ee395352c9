"""Simulates a device that saturates: a network whose values are limited to float16's largest, and a register that
records it.

The register replaces the two operators that clear and read the device's flag. This works in PyNative mode, where Python
runs the operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import backend
from gaccum_ms.accumulation import saturation

LARGEST = 65504.0


@ops.constexpr
def yes():
    return True


class Register:
    """The device's flag."""

    def __init__(self) -> None:
        self.is_set = False
        self.cleared = 0

    def clear(self, status: Tensor) -> Tensor:
        self.is_set = False
        self.cleared += 1
        return status

    def get(self, status: Tensor) -> Tensor:
        return Tensor([int(self.is_set)] * 8, ms.int32)


register = Register()


class Saturating(nn.Cell):
    """A product that saturates."""

    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor([[1.0], [2.0], [3.0]], ms.float32), name="weight")

    def construct(self, x):
        product = ops.matmul(x, self.weight)
        register.is_set |= bool(np.abs(product.asnumpy()).max() > LARGEST)
        return ops.clamp(product, -LARGEST, LARGEST)


@contextmanager
def device_that_saturates() -> Iterator[Register]:
    """Make the package see a 910A."""
    register.is_set, register.cleared = False, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "ascend_target", yes)
        patch.setattr(backend, "ascend_910a_target", yes)
        patch.setattr(saturation, "_clear", register.clear)
        patch.setattr(saturation, "_get", register.get)
        yield register


def batch(*overflowing: int, samples: int = 8) -> tuple[Tensor, Tensor]:
    """Inputs of 1, and of 1e5 in the given samples."""
    x = np.ones((samples, 3), np.float32)
    x[list(overflowing)] = 1e5
    return Tensor(x), Tensor(np.zeros((samples, 1), np.float32))
