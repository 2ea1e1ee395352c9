"""A step's Parameters, comparisons of them, and a loss scale that adjusts itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from mindspore import nn

from tests.support.reference import as_numpy, relative_error

State = Mapping[str, np.ndarray]


def everything(cell: nn.Cell) -> dict[str, np.ndarray]:
    """All Parameters, by name."""
    return {parameter.name: as_numpy(parameter) for parameter in cell.get_parameters()}


def assert_identical(one: State, other: State, but: Collection[str] = ()) -> None:
    """Check that all arrays are bit-identical."""
    assert one.keys() == other.keys()
    for name in one:
        if name not in but:
            np.testing.assert_array_equal(one[name], other[name], name)


def assert_close(one: State, other: State, tolerance: float = 1e-5) -> None:
    """Check that all arrays are equal to rounding, relative to each array's largest number."""
    assert one.keys() == other.keys()
    errors = {name: relative_error(one[name], other[name]) for name in one}
    assert max(errors.values()) < tolerance, errors


def manager(value: float = 2.0**10, window: int = 1000) -> nn.Cell:
    """A loss scale that halves at each overflow, and doubles after a number of good updates."""
    return nn.DynamicLossScaleUpdateCell(loss_scale_value=value, scale_factor=2, scale_window=window)
