"""BatchNorm and Dropout with accumulation; a warning describes the differences with BatchNorm."""

from __future__ import annotations

import warnings

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import GradAccumulationCell, WindowBatchNorm
from tests.support.reference import (
    CLASSES,
    BatchNormInEvalNet,
    ConvNet,
    Outer,
    as_numpy,
    batches,
    make_step,
    relative_error,
)


class BatchNormNet(ConvNet):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(6)
        self.norm2 = nn.BatchNorm1d(6 * 12)

    def logits(self, x):
        features = self.norm(self.conv(x.reshape((-1, 1, 3, 4)))).reshape((-1, 6 * 12))
        return self.out(self.norm2(features))


def step_of(network, micro_size=2, **options):
    """A step of a classifier with these options."""
    return make_step(nn.WithLossCell(network, nn.CrossEntropyLoss()), micro_size=micro_size, **options)


def batch(samples=8):
    return map(Tensor, batches(samples, 1)[0])


def test_batch_norm_draws_one_warning_that_says_what_differs(pynative):
    """At the first run, on the caller's line; never again."""
    step = step_of(BatchNormNet())
    with pytest.warns(UserWarning) as caught:
        step(*batch())
        step(*batch())
        step(*batch(7))
    assert len(caught) == 1
    text = str(caught[0].message)
    assert text.startswith("For 'GradAccumulationCell', the network has 2 BatchNorm layer(s) (")
    for part in ("norm", "norm2", "mean and variance of one micro-batch", "moving", "nn.GroupNorm"):
        assert part in text
    assert caught[0].filename == __file__


def test_the_warning_comes_when_a_schedule_makes_windows_of_several_batches(pynative):
    step = step_of(BatchNormNet(), micro_size=1)
    step.set_accumulation_steps(2)
    with pytest.warns(UserWarning, match=r"the network has 2 BatchNorm layer\(s\)"):
        step(*batch())


@pytest.mark.parametrize(("network", "micro_size"), [(BatchNormInEvalNet, 2), (ConvNet, 2), (BatchNormNet, 1)])
def test_no_warning_where_nothing_differs(network, micro_size, pynative):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_of(network(), micro_size)(*batch())


def test_layers_are_judged_by_their_mode_at_the_first_run(pynative):
    """A frozen layer is left out; one that was made in evaluation mode, and trains by then, is not."""
    network = BatchNormNet()
    step = step_of(network)
    network.norm2.set_train(False)
    with pytest.warns(UserWarning, match=r"the network has 1 BatchNorm layer\(s\) \(_backbone.norm\)"):
        step(*batch())
    network = BatchNormNet().set_train(False)
    cell = GradAccumulationCell(nn.WithLossCell(network, nn.CrossEntropyLoss()), 2)
    data = ms.dataset.NumpySlicesDataset(batches(8, 1)[0], shuffle=False).batch(8)
    with pytest.warns(UserWarning, match=r"the network has 2 BatchNorm layer\(s\)"):
        ms.Model(cell, optimizer=nn.SGD(cell.trainable_params(), 0.05)).train(1, data)


def test_the_warnings_come_where_another_graph_compiles_the_step():
    """As data sinking does, which never calls the step from Python."""
    step = make_step(Normalised(nn.BatchNorm1d(6)), micro_size=8)
    with pytest.warns(UserWarning) as caught:
        Outer(step).set_train()(*rows_of(8))
    texts = [str(one.message) for one in caught]
    assert len(texts) == 2
    assert "1 BatchNorm layer(s)" in texts[0] and "a micro-batch has one sample" in texts[1]


class OwnBatchNorm(ConvNet):
    """MindSpore's operator in a Cell of one's own, one for each mode or one alone."""

    def __init__(self, for_each_mode):
        super().__init__()
        self.scale, self.mean = (ms.Parameter(Tensor(np.ones(CLASSES, np.float32)), name=name) for name in "ab")
        self.shift, self.variance = (ms.Parameter(Tensor(np.ones(CLASSES, np.float32)), name=name) for name in "cd")
        self.in_training = ops.BatchNorm(is_training=True)
        self.in_evaluation = ops.BatchNorm(is_training=False) if for_each_mode else None

    def logits(self, x):
        normalise = self.in_training if self.training or self.in_evaluation is None else self.in_evaluation
        return normalise(super().logits(x), self.scale, self.shift, self.mean, self.variance)[0]


@pytest.mark.parametrize(("for_each_mode", "training"), [(True, True), (True, False), (False, False)])
def test_the_operator_in_a_cell_of_ones_own_is_seen(for_each_mode, training, pynative):
    network = OwnBatchNorm(for_each_mode)
    step = step_of(network)
    network.set_train(training)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(*batch())
    warned = [str(one.message) for one in caught if "1 BatchNorm layer(s) (_backbone)" in str(one.message)]
    assert len(warned) == (training or not for_each_mode)


@pytest.mark.filterwarnings("ignore:For 'GradAccumulationCell', the network has . BatchNorm")
@pytest.mark.parametrize(
    ("samples", "options", "warns"),
    [
        (4, {"micro_size": 4}, True),
        (1, {"micro_batch_size": 3}, True),
        (4, {"micro_size": 2}, False),
        (1, {"micro_size": 1, "accumulation_steps": 2}, True),
    ],
)
def test_one_warning_says_when_one_sample_is_harmful(samples, options, warns, pynative):
    network = BatchNormNet()
    step = step_of(network, **{"micro_size": None, **options})
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", message=".*a micro-batch has one sample")
        for _ in range(2):
            step(*batch(samples))
    assert len([one for one in caught if "a micro-batch has one sample" in str(one.message)]) == warns
    # What the warning says: with pixels nothing happens, with one value per channel there is no variance.
    assert np.isfinite(as_numpy(network.norm.moving_variance)).all()
    assert np.isfinite(as_numpy(network.norm2.moving_variance)).all() != warns


def test_frozen_layers_and_window_batch_norm_draw_no_warning_of_one_sample(pynative):
    for network in (BatchNormNet(), ConvNet()):
        network.norm3 = WindowBatchNorm(3)
        step = step_of(network, 4)
        network.set_train(False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", ".*is trained in evaluation mode")
            step(*batch(4))


@pytest.mark.filterwarnings("ignore:For 'GradAccumulationCell', the network has 2 BatchNorm")
def test_batch_norm_trains_and_updates_its_moving_statistics_per_micro_batch(pynative):
    """Moving mean after one batch in two micro-batches, by hand: m <- 0.9 m + 0.1 mean, twice."""
    network = BatchNormNet()
    x, y = batches(8, 1)[0]
    convolution = nn.Conv2d(1, 6, 3)
    convolution.weight.set_data(Tensor(as_numpy(network.conv.weight)))
    step = step_of(network)
    loss = step(Tensor(x), Tensor(y))
    assert np.isfinite(loss.asnumpy())
    expected = np.zeros(6)
    for half in (x[:4], x[4:]):
        features = convolution(Tensor(half.reshape(-1, 1, 3, 4))).asnumpy()
        expected = 0.9 * expected + 0.1 * features.mean(axis=(0, 2, 3))
    assert relative_error(as_numpy(network.norm.moving_mean), expected) < 1e-5


class DropoutNet(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor(np.ones(1000), ms.float32), name="weight")
        self.dropout = nn.Dropout(p=0.5)

    def construct(self, x):
        return (self.dropout(x * self.weight)).mean()


def test_dropout_draws_a_new_mask_for_each_micro_batch():
    """Gradients of a micro-batch of ones are 0 or 2 per weight; over four micro-batches in-between values appear."""
    ms.set_seed(1)
    network = DropoutNet()
    step = make_step(network, lambda weights: nn.SGD(weights, 1.0), micro_size=4)
    step(Tensor(np.ones((4, 1000)), ms.float32))
    gradient = (1 - network.weight.asnumpy()) * 1000
    times = np.round(gradient * 2).astype(int)  # micro-batches that kept the weight, 0 to 4
    np.testing.assert_allclose(gradient * 2, times, atol=1e-2)
    share = np.bincount(times, minlength=5) / 1000
    np.testing.assert_allclose(share, [1 / 16, 4 / 16, 6 / 16, 4 / 16, 1 / 16], atol=0.06)


# -- how a batch is cut ------------------------------------------------------------------------------------------------


class Normalised(nn.Cell):
    def __init__(self, norm):
        super().__init__()
        self.dense, self.norm, self.head = nn.Dense(5, 6), norm, nn.Dense(6, 1)

    def construct(self, x, y):
        return ops.square(self.head(self.norm(self.dense(x))) - y).mean()


def norm_step(norm, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make_step(Normalised(norm), **options)


def rows_of(samples, seed=0):
    random = np.random.default_rng(seed)
    return [Tensor(random.normal(size=(samples, width)), ms.float32) for width in (5, 1)]


@pytest.mark.filterwarnings("ignore:.*has 1 BatchNorm layer")
@pytest.mark.parametrize(
    ("mode", "options", "lengths"),
    [
        ("pynative", {"micro_batch_size": 3}, (7,)),
        ("pynative", {"micro_size": 4, "accumulation_steps": 2}, (9, 5)),
        ("graph", {"micro_size": 8}, (16, 9, 8, 5, 3, 2)),
    ],
    ids=["size", "window", "graph of open length"],
    indirect=["mode"],
)
def test_no_remainder_makes_the_moving_variance_nan(options, lengths, mode):
    step = norm_step(nn.BatchNorm1d(6), **options)
    if mode == "graph":
        step.set_inputs(*(Tensor(shape=[None, width], dtype=ms.float32) for width in (5, 1)))
    for samples in lengths:
        step(*rows_of(samples))
    assert np.isfinite(step.network.norm.moving_variance.asnumpy()).all()
    assert len(step.compile_cache) == (mode == "graph")


def sizes_of(step, samples):
    plan = step.window.plan_in_python([one.shape for one in rows_of(samples)])
    return [plan.size] * plan.full + [plan.rest] * (plan.rest > 0)


def test_it_is_judged_at_the_first_run_and_the_users_choice_stays(pynative):
    """A layer that is frozen after the step was built is cut as any other; as many micro-batches as samples, or one
    sample each, are the user's choice."""
    step = norm_step(nn.BatchNorm1d(6), micro_size=3)
    step.network.norm.set_train(False)
    step(*rows_of(7))
    assert sizes_of(step, 7) == [3, 3, 1]
    for options, samples in (({"micro_size": 4}, 4), ({"micro_batch_size": 1}, 4)):
        step = norm_step(nn.BatchNorm1d(6), **options)
        assert sizes_of(step, samples) == [1] * 4
    step = norm_step(nn.BatchNorm1d(6), micro_size=4)
    assert [sizes_of(step, samples) for samples in (8, 4, 7)] == [[2] * 4, [2, 2], [2, 2, 3]]
    step = norm_step(nn.LayerNorm((6,)), micro_size=4)
    assert [sizes_of(step, samples) for samples in (8, 4, 7)] == [[2] * 4, [1] * 4, [2, 2, 2, 1]]
