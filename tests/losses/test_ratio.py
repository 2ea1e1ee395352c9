"""Networks that return a sum and its count, ``reduction="ratio"`` , on one process, against NumPy. Ranks:
test_counted_ranks.py. What is the same with `count` : test_counts.py."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor, nn

from gaccum_ms import GradAccumulationCell, audit
from tests.losses.test_counts import RATE, START, Ratio, data, gradient, oracle
from tests.support.reference import as_numpy, make_step
from tests.support.reuse import Reused


class Returning(Ratio):
    """Returns what `made` makes of its sum, its count and the mask."""

    def __init__(self, made):
        super().__init__()
        self.made = made

    def construct(self, x, mask):
        return self.made(*super().construct(x, mask), mask)


def with_number(total, count, mask):
    return total, mask.shape[0]


def step_of(network=Ratio, **options):
    network = network() if isinstance(network, type) else network
    options = {"reduction": "ratio", **options}
    return make_step(network, lambda weights: nn.Momentum(weights, RATE, 0.9), **options)


steps = Reused(step_of)


def run(step, *batch):
    return step(*(Tensor(np.asarray(one, np.float32)) for one in batch))


def test_a_denominator_may_be_a_number(pynative):
    x, mask = data([1.0] * 7)
    step = step_of(Returning(with_number), micro_size=3)
    np.testing.assert_allclose(run(step, x, mask).asnumpy(), oracle(x, mask)[0], rtol=1e-5)
    np.testing.assert_allclose(gradient(step), oracle(x, mask)[1], rtol=1e-4, atol=1e-5)


def test_batches_that_share_an_update_equal_the_joined_batch(pynative):
    """So does a flushed tail."""
    step = steps(micro_size=2, accumulation_steps=2)
    parts = [data(mask, seed) for seed, mask in enumerate([[1, 0, 0, 0, 1], [0] * 5, [2, 0.5, 0, 0, 0]])]
    x, mask = (np.concatenate(column) for column in zip(*parts[:2], strict=True))
    losses = [float(run(step, *part).asnumpy()) for part in parts[:2]]
    np.testing.assert_allclose(losses, [oracle(*parts[0])[0], 0.0], rtol=1e-5)
    np.testing.assert_allclose(step.window_loss.asnumpy(), oracle(x, mask)[0], rtol=1e-5)
    np.testing.assert_allclose(gradient(step), oracle(x, mask)[1], rtol=1e-4, atol=1e-5)
    weight = as_numpy(step.weights[0])
    run(step, *parts[2])
    assert step.flush()
    errors = parts[2][0] @ weight - 1
    np.testing.assert_allclose(step.window_loss.asnumpy(), (errors**2 * parts[2][1]).sum() / 2.5, rtol=1e-5)


def test_a_bad_denominator_spoils_its_window_alone(pynative):
    x, mask = data([1, 0.5, 1, 1, 0])
    step = steps(micro_size=2, accumulation_steps=2)
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
        (lambda total, count, mask: (total, count, count), "a tuple, but got a tuple of 3"),
        (lambda total, count, mask: (total, mask), r"but got shape \(\) and shape \(1,\). Sum"),
        (lambda total, count, mask: (total, "count"), r"but got shape \(\) and 'String'. Sum"),
        (lambda total, count, mask: (mask * total, mask), r"but got shape \(1,\) and shape \(1,\). Sum"),
    ],
)
def test_what_is_no_ratio_is_refused(made, got, pynative):
    step = step_of(Returning(made), micro_size=2)
    words = rf"with reduction='ratio' the network must return \(numerator, denominator\).*{got}"
    with pytest.raises(ValueError, match=words):
        run(step, *data([1, 1]))
    np.testing.assert_array_equal(as_numpy(step.weights[0]), START.astype(np.float32))


class AlreadyMean(Ratio):
    def construct(self, x, mask):
        total, count = super().construct(x, mask)
        return total / count, count


@pytest.mark.parametrize(("network", "ok"), [(Ratio(), True), (Returning(with_number), True), (AlreadyMean(), False)])
def test_audit_accepts_a_ratio_and_rejects_a_numerator_that_is_already_a_mean(network, ok, pynative):
    x, mask = data([1, 1, 0.5, 1, 2, 1])
    cell = GradAccumulationCell(network, 2, reduction="ratio")
    report = audit(cell, nn.SGD(cell.trainable_params(), RATE), Tensor(x), Tensor(mask))
    assert report.ok is ok, report
