"""What networks with ``reduction="ratio"`` can return. What it means: options/test_setups.py."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor

from tests.losses.test_counts import START, Ratio, data, gradient, oracle, step_of
from tests.support.reference import as_numpy


class Returning(Ratio):
    """Returns what `made` makes of its sum, its count and the mask."""

    def __init__(self, made):
        super().__init__()
        self.made = made

    def construct(self, x, mask):
        return self.made(*super().construct(x, mask), mask)


def run(step, *batch):
    return step(*(Tensor(np.asarray(one, np.float32)) for one in batch))


def test_a_bad_denominator_spoils_its_window_alone(pynative):
    x, mask = data([1, 0.5, 1, 1, 0])
    step = step_of(Ratio(), micro_size=2, accumulation_steps=2, reduction="ratio")
    before = as_numpy(step.weights[0])
    with pytest.raises(ValueError, match="The window that the batch is in does not update"):
        run(step, x, [1, 1, 1, -1, 0])
    run(step, x, mask)
    np.testing.assert_array_equal(as_numpy(step.weights[0]), before)
    assert int(step.window_position.asnumpy()) == 0
    assert int(step.update_count.asnumpy()) == 0
    run(step, x, mask)
    run(step, x, mask)
    np.testing.assert_allclose(gradient(step), oracle(x, mask)[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("made", "got"),
    [
        (lambda total, count, mask: total, "a tuple, but got one output"),
        (lambda total, count, mask: (total, mask), r"but got shape \(\) and shape \(1,\). Sum"),
    ],
)
def test_what_is_no_ratio_is_refused(made, got, pynative):
    step = step_of(Returning(made), micro_size=2, reduction="ratio")
    words = rf"with reduction='ratio' the network must return \(numerator, denominator\).*{got}"
    with pytest.raises(ValueError, match=words):
        run(step, *data([1, 1]))
    np.testing.assert_array_equal(as_numpy(step.weights[0]), START.astype(np.float32))
