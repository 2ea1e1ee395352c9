"""Overflows on a device that saturates, where no gradient looks infinite: steps in PyNative mode with a simulated flag
(saturating.py). Not run on hardware."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops

from gaccum_ms import GradAccumulator, backend
from gaccum_ms.accumulation import saturation
from tests.support.reference import make_step
from tests.support.saturating import Saturating, batch, device_that_saturates, register, yes
from tests.support.two_ranks import case


@ops.constexpr
def no():
    return False


def test_which_devices_saturate(monkeypatch):
    for ascend, is_910a, is_910b, mode, expected in (
        (no, no, no, "SATURATION_MODE", False),
        (yes, yes, no, "", True),
        (yes, no, yes, "", False),
        (yes, no, yes, "SATURATION_MODE", True),
    ):
        monkeypatch.setattr(backend, "ascend_target", ascend)
        monkeypatch.setattr(backend, "ascend_910a_target", is_910a)
        monkeypatch.setattr(backend, "ascend_910b_target", is_910b)
        monkeypatch.setenv("MS_ASCEND_CHECK_OVERFLOW_MODE", mode)
        assert saturation.saturates() is expected


def step_of(net, **options):
    scale = nn.DynamicLossScaleUpdateCell(64.0, 2, 100)
    loss = nn.WithLossCell(net, nn.MSELoss())
    return make_step(loss, lambda weights: nn.SGD(weights, 1e-3), scale, **{"micro_size": 4, **options})


def updates(net, call) -> bool:
    """Whether a call has changed the weight."""
    before = net.weight.asnumpy().copy()
    call()
    return not np.array_equal(before, net.weight.asnumpy())


@pytest.mark.parametrize("options", [{"max_grad_norm": 1.0}, {"micro_size": 1}])
def test_an_overflow_in_any_micro_batch_drops_the_window(pynative, options):
    with device_that_saturates():
        net = Saturating()
        step = step_of(net, **options)
        register.is_set = True  # left by earlier operations
        for overflowing in ([], [0], [7]):
            outputs = []
            assert updates(net, lambda: outputs.extend(step(*batch(*overflowing)))) is not bool(overflowing)  # noqa: B023
            loss, overflow, _ = outputs
            assert np.isfinite(loss.asnumpy())
            assert bool(overflow.asnumpy()) is bool(overflowing)
        assert float(step.scale_sense.asnumpy()) == 64 / 2 / 2
        assert int(step.update_count.asnumpy()) == 1


def test_a_window_of_several_batches_remembers(pynative):
    """The first batch overflows, and other code clears the flag before the second. Before the second batch of the third
    window, other code sets the flag, which must not affect the window."""
    with device_that_saturates():
        net = Saturating()
        step = step_of(net, accumulation_steps=2)
        for window in range(3):
            step(*batch(*([3] if window == 1 else [])))
            register.is_set = window == 2
            assert updates(net, lambda: step(*batch())) is (window != 1)
        assert float(step.scale_sense.asnumpy()) == 32


def test_a_loop_of_ones_own(pynative):
    """The backward sets the flag before the accumulator is called; the accumulator clears it for the next backward."""
    with device_that_saturates():
        net = Saturating()
        optimizer = nn.SGD(net.trainable_params(), 1e-3)
        accumulator = GradAccumulator(optimizer, 2, scale_sense=ms.Tensor(2.0), jit=False)
        forward = nn.WithLossCell(net, nn.MSELoss())
        grad_fn = ms.value_and_grad(lambda x, y: accumulator.scale(forward(x, y)), None, optimizer.parameters)

        def add(*overflowing):
            _, gradients = grad_fn(*batch(*overflowing))
            return accumulator(gradients)

        assert [add(), add()] == [False, True]
        assert [add(2), add()] == [False, False]
        assert [add(), add(2)] == [False, False]
        assert [add(), add()] == [False, True]


@pytest.mark.distributed
def test_an_overflow_on_one_rank_drops_the_window_on_all(rank_pair, tmp_path):
    first, second = (case(one, "overflow") for one in rank_pair.worker("tests.ranks.single_tests_worker", tmp_path))
    for name in ("one batch", "two batches"):
        np.testing.assert_array_equal(first[name], second[name])
        overflow, weight = first[name].T
        if name == "one batch":
            np.testing.assert_array_equal(overflow, [0, 1, 0])
        assert weight[0] != 1
        assert weight[1] == weight[0]
        assert weight[2] != weight[1]
