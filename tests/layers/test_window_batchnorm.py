"""WindowBatchNorm: its moving statistics are the whole batch's, and move only once per update."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import WindowBatchNorm
from tests.support.reference import as_numpy, batches, make_step, relative_error


class Net(nn.Cell):
    """The layer comes first, so that its input does not depend on another layer's statistics."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        self.out = ms.Parameter(Tensor(np.linspace(-1, 1, 12), ms.float32), name="out")
        self.fail_at = 0

    def construct(self, x, y):
        if self.fail_at > 0:  # in PyNative mode: micro-batches until the failure
            self.fail_at -= 1
            if self.fail_at == 0:
                raise ZeroDivisionError
        normalised = self.norm(x.reshape((-1, 2, 3, 2))).reshape((-1, 12))
        return ops.square((normalised * self.out).sum(-1) - y).mean()


def data(samples, number=2):
    """Data with a mean far from zero, and micro-batches that differ."""
    return [(x + 5 + np.linspace(-2, 2, samples)[:, None].astype(np.float32), y) for x, y in batches(samples, number)]


def step_of(norm, **options):
    return make_step(Net(norm), **options)


def run(step, data_set):
    """The moving statistics after these batches."""
    for x, y in data_set:
        step(Tensor(x), Tensor(y))
    norm = step.network.norm
    return np.stack([as_numpy(norm.moving_mean), as_numpy(norm.moving_variance)])


def whole_batch(data_set):
    """The moving statistics of MindSpore's own layer on whole batches, by hand: the variance is unbiased."""
    moving = np.array([[0.0, 0.0], [1.0, 1.0]])
    for x, _ in data_set:
        values = x.astype(np.float64).reshape(-1, 2, 6).transpose(1, 0, 2).reshape(2, -1)
        moving = 0.9 * moving + 0.1 * np.stack([values.mean(1), values.var(1, ddof=1)])
    return moving


@pytest.mark.filterwarnings("ignore:For 'GradAccumulationCell', the network has 1 BatchNorm")
def test_moving_statistics_are_the_whole_batchs_and_those_of_mindspores_own_layer(mode):
    whole = data(12)
    step = step_of(WindowBatchNorm(2), **({"micro_size": 4} if mode == "graph" else {"micro_batch_size": 5}))
    assert relative_error(run(step, whole), whole_batch(whole)) < 1e-6
    assert not as_numpy(step.network.norm.window_statistics).any()
    if mode == "pynative":
        assert relative_error(run(step_of(nn.BatchNorm2d(2), micro_size=1), whole), whole_batch(whole)) < 1e-6


def test_windows_of_several_batches(pynative):
    """The batches are unequal; nothing moves before the window's end."""
    whole = data(12)
    step = step_of(WindowBatchNorm(2), micro_batch_size=3, accumulation_steps=2)
    parts = [part for x, y in whole for part in ((x[:8], y[:8]), (x[8:], y[8:]))]
    np.testing.assert_array_equal(run(step, parts[:1]), [[0, 0], [1, 1]])
    assert relative_error(run(step, parts[1:]), whole_batch(whole)) < 1e-6


def test_a_window_that_overflows_moves_nothing_and_leaves_nothing(pynative):
    whole = data(12)
    bad = (whole[1][0].copy(), whole[1][1])
    bad[0][7] = np.inf
    step = step_of(WindowBatchNorm(2), micro_size=4, scale_sense=nn.DynamicLossScaleUpdateCell(2.0**4, 2, 1000))
    before = run(step, whole[:1])
    np.testing.assert_array_equal(run(step, [bad]), before)
    assert relative_error(run(step, whole[1:]), whole_batch(whole)) < 1e-6


@pytest.mark.filterwarnings("ignore:For 'GradAccumulationCell', a batch failed half-way")
def test_a_batch_that_fails_half_way_leaves_nothing(pynative):
    """In a window of two, the first batch is lost too."""
    whole = data(12)
    step = step_of(WindowBatchNorm(2), micro_size=4, accumulation_steps=2)
    run(step, whole[:1])
    step.network.fail_at = 3
    with pytest.raises(ZeroDivisionError):
        run(step, whole[-1:])
    assert not as_numpy(step.network.norm.window_statistics).any()
    np.testing.assert_array_equal(run(step, []), [[0, 0], [1, 1]])


def test_a_dropped_micro_batch_is_left_out(pynative):
    x, y = data(12, 1)[0]
    bad = x.copy()
    bad[3:6] = np.nan
    step = step_of(WindowBatchNorm(2), micro_size=4, overflow="drop_micro_batch")
    rest = np.r_[0:3, 6:12]
    assert relative_error(run(step, [(bad, y)]), whole_batch([(x[rest], y[rest])])) < 1e-6


def test_evaluation_normalises_by_them(pynative):
    whole = data(12)
    norm = WindowBatchNorm(2)
    step = step_of(norm, micro_size=2)
    mean, variance = run(step, whole)
    step.set_train(False)
    x, shape = whole[0][0].reshape(-1, 2, 3, 2), (1, 2, 1, 1)
    gamma, beta = as_numpy(norm.gamma).reshape(shape), as_numpy(norm.beta).reshape(shape)
    expected = (x - mean.reshape(shape)) / np.sqrt(variance.reshape(shape) + 1e-5) * gamma + beta
    assert relative_error(norm(Tensor(x)).asnumpy(), expected) < 1e-5


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 2, 3, 2)])
def test_in_training_it_normalises_and_trains_as_mindspores_layer(shape, pynative):
    """The gradients of the input, the scale and the shift are compared too."""
    random = np.random.default_rng(3)
    x, weights = (Tensor(random.normal(size=shape).astype(np.float32)) for _ in range(2))

    def gradients_of(norm):
        norm.set_train()
        both = ms.value_and_grad(lambda x: (norm(x) * weights).sum(), 0, norm.trainable_params())
        value, (of_input, of_parameters) = both(x)
        return [np.array(one.asnumpy()) for one in (value, of_input, *of_parameters)]

    theirs = nn.BatchNorm1d(4) if len(shape) == 2 else nn.BatchNorm3d(4)
    for own, reference in zip(gradients_of(WindowBatchNorm(4)), gradients_of(theirs), strict=True):
        assert relative_error(own, reference) < 1e-4


@pytest.mark.distributed
def test_two_ranks_pool_their_statistics(rank_pair, tmp_path):
    expected = whole_batch(data(12))
    for results in rank_pair.worker("tests.ranks.single_tests_worker", tmp_path):
        for name in ("single", "spanning"):
            assert relative_error(results[f"pooled/{name}"], expected) < 1e-6, name


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"'momentum' must be between 0 and 1, but got 1\.5"):
        WindowBatchNorm(2, momentum=1.5)
