"""BatchNorm and Dropout with accumulation; a warning describes the differences with BatchNorm."""

from __future__ import annotations

import warnings

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from support.reference import BatchNormInEvalNet, ConvNet, as_numpy, batches, relative_error

from gaccum_ms import GradAccumulationCell, TrainOneStepWithGradAccumulationCell


class BatchNormNet(ConvNet):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(6)
        self.norm2 = nn.BatchNorm1d(6 * 12)

    def logits(self, x):
        features = self.norm(self.conv(x.reshape((-1, 1, 3, 4)))).reshape((-1, 6 * 12))
        return self.out(self.norm2(features))


def make_step(network, micro_size=2):
    cell = GradAccumulationCell(nn.WithLossCell(network, nn.CrossEntropyLoss()), micro_size)
    return TrainOneStepWithGradAccumulationCell(cell, nn.SGD(cell.trainable_params(), 0.05)).set_train()


def test_batch_norm_draws_one_warning_that_says_what_differs():
    with pytest.warns(UserWarning) as caught:
        make_step(BatchNormNet())
    assert len(caught) == 1
    text = str(caught[0].message)
    assert text.startswith("For 'GradAccumulationCell', the network has 2 BatchNorm layer(s) (")
    for part in ("norm", "norm2", "mean and variance of one micro-batch", "moving", "nn.GroupNorm"):
        assert part in text
    assert caught[0].filename == __file__


def test_the_warning_comes_when_a_schedule_makes_windows_of_several_batches():
    step = make_step(BatchNormNet(), micro_size=1)
    with pytest.warns(UserWarning, match=r"the network has 2 BatchNorm layer\(s\)"):
        step.set_accumulation_steps(2)


@pytest.mark.parametrize(("network", "micro_size"), [(BatchNormInEvalNet, 2), (ConvNet, 2), (BatchNormNet, 1)])
def test_no_warning_where_nothing_differs(network, micro_size):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_step(network(), micro_size)


@pytest.mark.core(mode="graph")
@pytest.mark.filterwarnings("ignore:For 'GradAccumulationCell', the network has 2 BatchNorm")
def test_batch_norm_trains_and_updates_its_moving_statistics_per_micro_batch(mode):
    """Moving mean after one batch in two micro-batches, by hand: m <- 0.9 m + 0.1 mean, twice."""
    network = BatchNormNet()
    x, y = batches(8, 1)[0]
    convolution = nn.Conv2d(1, 6, 3)
    convolution.weight.set_data(Tensor(as_numpy(network.conv.weight)))
    step = make_step(network)
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


@pytest.mark.core(mode="graph")
def test_dropout_draws_a_new_mask_for_each_micro_batch(mode):
    """Gradients of a micro-batch of ones are 0 or 2 per weight; over four micro-batches in-between values appear."""
    ms.set_seed(1)
    network = DropoutNet()
    cell = GradAccumulationCell(network, 4)
    step = TrainOneStepWithGradAccumulationCell(cell, nn.SGD(cell.trainable_params(), 1.0)).set_train()
    step(Tensor(np.ones((4, 1000)), ms.float32))
    gradient = (1 - network.weight.asnumpy()) * 1000
    kept = np.round(gradient * 2).astype(int)  # micro-batches that kept the weight, 0 to 4
    np.testing.assert_allclose(gradient * 2, kept, atol=1e-2)
    share = np.bincount(kept, minlength=5) / 1000
    np.testing.assert_allclose(share, [1 / 16, 4 / 16, 6 / 16, 4 / 16, 1 / 16], atol=0.06)
