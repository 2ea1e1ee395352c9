"""The CPU kernels used instead of AssignAdd, Assign and AllFinite have bit-identical results."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from gaccum_ms.cpu.kernels import add_in_place, all_finite, zero_in_place


class Adding(nn.Cell):
    def __init__(self, shape, dtype):
        super().__init__()
        self.ours = Parameter(ops.zeros(shape, dtype), name="ours", requires_grad=False)
        self.plain = Parameter(ops.zeros(shape, dtype), name="plain", requires_grad=False)

    def construct(self, *values):
        """Add a value, or clear."""
        if len(values) == 0:
            return zero_in_place(self.ours)
        added = add_in_place(self.ours, values[0])
        return ops.depend(values[0], (added, ops.assign_add(self.plain, values[0])))


class Checking(nn.Cell):
    def construct(self, *gradients):
        return all_finite(gradients)


@pytest.mark.parametrize(
    ("mode", "shape", "dtype"),
    [
        ("graph", (), ms.float32),
        ("graph", (33, 785), ms.float32),
        ("pynative", (2, 3, 4, 5, 6), ms.float32),
        ("pynative", (7,), ms.float16),
    ],
    indirect=["mode"],
)
def test_sums_are_those_of_assign_add_and_are_cleared(mode, shape, dtype):
    """Values are large, small, infinite, NaN, denormal, and zeros of both signs. For float16 and for scalars,
    `add_in_place` is AssignAdd itself."""
    cell = Adding(shape, dtype)
    rng = np.random.default_rng(0)
    for step in range(8):
        value = np.asarray(rng.standard_normal(shape) * 10.0 ** rng.integers(-4, 4), np.float32)
        if step == 0:  # zeros of both signs, added to the initial zeros
            value = np.copysign(np.zeros_like(value), value)
        if step == 5 and value.size > 6:
            value.flat[:6] = [np.inf, -np.inf, np.nan, 1e-42, -0.0, 3e38]
        cell(Tensor(value).astype(dtype))
    bits = np.uint16 if dtype == ms.float16 else np.uint32
    ours, plain = (parameter.asnumpy().view(bits) for parameter in (cell.ours, cell.plain))
    assert plain.any()
    np.testing.assert_array_equal(ours, plain)
    cell()
    assert not cell.ours.astype(ms.float32).asnumpy().any(), "nor is what was not finite left"


@pytest.mark.parametrize(
    ("mode", "dtype"), [("graph", ms.bfloat16), ("pynative", ms.float32), ("pynative", ms.float64)], indirect=["mode"]
)
def test_one_number_that_is_not_finite_is_found(mode, dtype):
    """It may be at either end of any gradient. The largest finite numbers, whose sum is infinite, count as finite."""
    limits = {ms.float64: np.finfo(np.float64).max, ms.float32: np.finfo(np.float32).max}
    largest = limits.get(dtype, 3.3895314e38)
    of_numpy = np.float64 if dtype == ms.float64 else np.float32
    shapes = (), (7,), (33, 785), (2, 3, 4, 5)
    check = Checking()

    def is_found(bad=None, which=0, place=0):
        gradients = [np.full(shape, largest, of_numpy) for shape in shapes]
        if bad is not None:
            gradients[which].flat[place] = bad
        finite = check(*[Tensor(gradient).astype(dtype) for gradient in gradients])
        assert finite.shape == () and finite.dtype == ms.bool_
        return not finite

    assert not is_found()
    for which in range(len(shapes)):
        for bad, place in ((np.inf, 0), (-np.inf, -1), (np.nan, -1)):
            assert is_found(bad, which, place)
