"""Binary cross entropy of logits in PyNative mode: each micro-batch counts by its own size, not by the first one's."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

from gaccum_ms import GradAccumulationCell, audit
from gaccum_ms.backend import pynative_executor
from tests.support.reference import make_step

ONES = Tensor(np.ones(2, np.float32))
LOSSES = {
    "nn": nn.BCEWithLogitsLoss(),
    "nn weighted": nn.BCEWithLogitsLoss(weight=3 * ONES, pos_weight=ONES),
    "ops": ops.binary_cross_entropy_with_logits,
    "mint": mint.nn.functional.binary_cross_entropy_with_logits,
    "operator": lambda logits, labels: ops.BCEWithLogitsLoss()(logits, labels, ONES, ONES),
    "sum": nn.BCEWithLogitsLoss("sum"),
}
rng = np.random.default_rng(0)
X = rng.normal(1, 1, (10, 3)).astype(np.float32)
Y = rng.integers(0, 2, (10, 2)).astype(np.float32)


class Network(nn.Cell):
    def __init__(self, loss):
        super().__init__()
        self.dense = nn.Dense(3, 2, weight_init=Tensor(rng.normal(size=(2, 3)).astype(np.float32)))
        self.loss = loss

    def construct(self, x, y):
        return self.loss(self.dense(x), y)


def gradient(network, x, y, name="nn"):
    """Of the mean's, or the sum's, in NumPy and float64."""
    logits = x.astype(np.float64) @ network.dense.weight.asnumpy().T + network.dense.bias.asnumpy()
    scale = {"sum": 1, "nn weighted": 3 / y.size}.get(name, 1 / y.size)
    return scale * (1 / (1 + np.exp(-logits)) - y).T @ x


@pytest.fixture(autouse=True)
def no_first_size(pynative):
    """MindSpore forgets the first size of the process."""
    pynative_executor.clear_res()


def of_mindspore(network, size):
    batch = Tensor(X[:size]), Tensor(Y[:size])
    return ms.value_and_grad(network, None, network.trainable_params())(*batch)[1][0].asnumpy()


@pytest.mark.parametrize("name", LOSSES)
def test_an_update_is_the_whole_batchs(name):
    """After a gradient of another size, with 4 + 4 + 2 samples."""
    network = Network(LOSSES[name])
    of_mindspore(network, 7)
    before, expected = network.dense.weight.asnumpy().copy(), gradient(network, X, Y, name)
    make_step(network, micro_size=3, reduction="sum" if name == "sum" else "mean")(Tensor(X), Tensor(Y))
    np.testing.assert_allclose(before - network.dense.weight.asnumpy(), 0.1 * expected, rtol=1e-4, atol=1e-6)


def test_an_audits_whole_batch_is_right_too():
    """Otherwise MindSpore's own step, the reference, is the one that is wrong."""
    network = Network(LOSSES["nn"])
    of_mindspore(network, 3)
    report = audit(GradAccumulationCell(network, 3), nn.SGD(network.trainable_params(), 0.1), Tensor(X), Tensor(Y))
    assert report.ok, report
