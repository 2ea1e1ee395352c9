"""Windows that count nothing make no update without `min_count` , and say so. With it: options/test_setups.py. The loss
is a detector's: a sum over all samples, divided by the number of positives."""

from __future__ import annotations

import warnings

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import GradAccumulator
from tests.support.reference import as_numpy, make_step
from tests.support.state import assert_identical, everything

START = np.linspace(-1, 1, 4)
RATE = 0.5
POSITIVES, NONE = (ms.Tensor(counts, ms.float32) for counts in ([1, 1, 0, 0, 0, 0, 1, 0, 1], [0] * 9))
X = Tensor(np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32))
GRADIENTS = (Tensor(np.ones(4, np.float32)),)


class Detector(nn.Cell):
    """The sum of log(1 + exp(x w)) over all samples."""

    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor(START, ms.float32), name="weight")

    def construct(self, x, positives):
        return ops.log(1 + ops.exp((x * self.weight).sum(-1))).sum()


def positives_of(x, positives):
    return positives.sum()


def accumulator_of(steps, **options):
    return GradAccumulator(nn.SGD(Detector().trainable_params(), RATE), steps, **options)


def step_of(**options):
    options = {"reduction": "sum", "count": positives_of, "micro_size": 3, **options}
    return make_step(Detector(), lambda weights: nn.Momentum(weights, RATE, 0.9), **options)


def test_a_window_that_overflowed_as_a_whole_makes_no_update_in_spite_of_min_count(pynative):
    """An update with a gradient of zero would move the weights by their momentum."""
    step = step_of(min_count=2.5, overflow="drop_micro_batch")
    step(X, POSITIVES)
    before = everything(step)
    step(X * np.nan, POSITIVES)
    assert int(step.dropped_micro_batches.asnumpy()) > 0
    records = ("batch_count", "window_count", "dropped_micro_batches")
    assert_identical(everything(step), before, but=[f"gaccum_ms.{name}" for name in records])


def test_without_min_count_a_window_of_nothing_makes_no_update_and_says_so_once(pynative):
    step = step_of()
    before = everything(step)
    with pytest.warns(UserWarning, match="'GradAccumulationCell', a window counted nothing on any rank.*min_count=1"):
        step(X, NONE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(step(X, NONE)) == 0.0
    assert_identical(everything(step), before, but=("gaccum_ms.batch_count",))


def test_grad_accumulator_of_nothing_says_so_once(pynative):
    accumulator = accumulator_of(1, jit=False)
    with pytest.warns(UserWarning, match="'GradAccumulator', a window counted nothing on any rank.*min_count=1"):
        assert not accumulator(GRADIENTS, 0)
    assert not accumulator(GRADIENTS, 0)
    np.testing.assert_array_equal(as_numpy(accumulator.weights[0]), START.astype(np.float32))


def test_grad_accumulator_needs_the_counts_that_it_divides_by(pynative):
    accumulator = accumulator_of(2, min_count=1.0)

    @ms.jit
    def add(gradients):
        return accumulator(gradients)

    for call in (accumulator, add):
        with pytest.raises(TypeError, match=r"'GradAccumulator', with 'min_count', or .* but got none"):
            call(GRADIENTS)
        assert int(accumulator.window_position.asnumpy()) == 0


def test_grad_accumulator_refuses_bad_options():
    for options, error, words in (
        ({"reduction": "ratio"}, ValueError, "'reduction' must be one of"),
        ({"min_count": 0}, ValueError, "'min_count' must be positive and finite, but got 0"),
        ({"min_count": "1"}, TypeError, "'min_count' must be a float, but got '1'"),
    ):
        with pytest.raises(error, match=f"For 'GradAccumulator', the argument {words}"):
            accumulator_of(2, **options)
