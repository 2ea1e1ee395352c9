"""BatchNorm replaced by GroupNorm: kept and dropped Parameters, and exact accumulation afterwards."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

from gaccum_ms import convert_batchnorm_to_groupnorm
from gaccum_ms.layers.batchnorm import batch_norm_names
from tests.support.reference import CLASSES, Classifier, accumulated, assert_equivalent, batches, relative_error, train


class NormsNet(Classifier):
    """BatchNorm for inputs of two, four and five axes, in a container, shared, and in a plain list."""

    def __init__(self):
        super().__init__()
        self.head = nn.SequentialCell(nn.Conv2d(1, 6, 3, has_bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.blocks = nn.CellList([nn.SequentialCell(nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6))])
        self.volume = nn.BatchNorm3d(6)
        self.row = nn.BatchNorm1d(72, affine=False)
        self.again = self.row
        self.steps = [self.row, self.again]
        self.out = nn.Dense(72, CLASSES)

    def logits(self, x):
        features = self.head(x.reshape((-1, 1, 3, 4)))
        features = ops.relu(self.blocks[0](features)) + features
        features = self.volume(features.reshape((-1, 6, 3, 2, 2))).reshape((-1, 72))
        features = ops.tanh(self.steps[1](self.steps[0](features)))
        return self.out(self.again(features))


LAYERS = ["head.1", "blocks.0.1", "volume", "row"]


def norms_net():
    network = NormsNet()
    random = np.random.default_rng(5)
    for parameter in network.get_parameters():
        parameter.set_data(Tensor(random.normal(size=parameter.shape) * 0.3 + 0.5, ms.float32))
    return network


def group_norm(x, groups, gamma, beta, eps):
    """GroupNorm in NumPy."""
    rows = x.reshape(x.shape[0], groups, -1).astype(np.float64)
    rows = (rows - rows.mean(axis=2, keepdims=True)) / np.sqrt(rows.var(axis=2, keepdims=True) + eps)
    shape = (1, -1) + (1,) * (x.ndim - 2)
    return rows.reshape(x.shape) * gamma.reshape(shape) + beta.reshape(shape)


def test_every_layer_is_replaced_and_named_but_those_that_normalise_by_constants():
    network = norms_net()
    assert batch_norm_names(network) == LAYERS
    assert convert_batchnorm_to_groupnorm(network, 3) == LAYERS
    left = {parameter.name for parameter in network.get_parameters()}
    assert {"head.1.gamma", "head.1.beta", "volume.bn2d.gamma", "volume.bn2d.beta"} <= left
    assert not any("moving" in name for name in left)
    assert network.row is network.again is network.steps[0] is network.steps[1]
    network = nn.SequentialCell(nn.BatchNorm2d(4, use_batch_statistics=False), nn.BatchNorm2d(4))
    assert convert_batchnorm_to_groupnorm(network, 2) == ["1"]
    assert type(network[0]) is nn.BatchNorm2d


def test_parameters_stay_the_same_objects_with_name_dtype_and_requires_grad():
    network = norms_net()
    network.head[1].gamma.set_dtype(ms.float16)
    network.volume.bn2d.beta.requires_grad = False
    network.head[1].to_float(ms.float16)
    network.set_train()
    before = {parameter.name: parameter for parameter in network.get_parameters()}
    convert_batchnorm_to_groupnorm(network, 2)
    for parameter in network.get_parameters():
        assert parameter is before[parameter.name]
    assert network.head[1].gamma.dtype == ms.float16
    assert network.head[1].get_flags()["fp16"] and network.head[1].training
    assert not network.row.gamma.requires_grad  # affine=False
    assert not network.volume.beta.requires_grad


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.BatchNorm1d, (5, 8)), (nn.BatchNorm3d, (5, 8, 2, 3, 4)), (mint.nn.BatchNorm2d, (5, 8, 3, 4))],
)
def test_the_new_layer_computes_group_norm(layer, shape, pynative):
    random = np.random.default_rng(1)
    network = nn.SequentialCell(layer(8, eps=1e-3))
    x = random.normal(size=shape).astype(np.float32)
    convert_batchnorm_to_groupnorm(network, 2)
    gamma, beta = (random.normal(size=8).astype(np.float32) for _ in range(2))
    network[0].gamma.set_data(Tensor(gamma))
    network[0].beta.set_data(Tensor(beta))
    expected = group_norm(x, 2, gamma, beta, 1e-3)
    assert relative_error(network(Tensor(x)).asnumpy(), expected) < 1e-5


def test_a_network_that_has_run_is_compiled_anew():
    network = nn.SequentialCell(nn.BatchNorm2d(4)).set_train(False)
    x = np.random.default_rng(2).normal(size=(2, 4, 3, 3)).astype(np.float32)
    network(Tensor(x))
    convert_batchnorm_to_groupnorm(network, 2)
    assert relative_error(network(Tensor(x)).asnumpy(), group_norm(x, 2, np.ones(4), np.zeros(4), 1e-5)) < 1e-5


def test_accumulation_is_exact_and_warns_of_nothing(pynative):
    """In these tests a warning is an error."""

    def run(make_step):
        network = norms_net()
        convert_batchnorm_to_groupnorm(network, 3)
        return train(make_step, network, nn.SGD(network.trainable_params(), 0.05), batches(12, 2))

    assert_equivalent(run(accumulated(micro_batch_size=5)), run(nn.TrainOneStepCell), 1e-5)


# -- refused -----------------------------------------------------------------------------------------------------------


def test_groups_that_do_not_divide_are_refused_before_anything_changes():
    """The layer "row" is not named: 4 divides 72."""
    network = norms_net()
    words = r"'num_groups' must divide .* but got 4 and head.1 \(6\), blocks.0.1 \(6\), volume \(6\).* divided by 6"
    with pytest.raises(ValueError, match=words) as caught:
        convert_batchnorm_to_groupnorm(network, 4)
    assert "row" not in str(caught.value)
    assert batch_norm_names(network) == LAYERS


def test_bad_networks_are_refused(pynative):
    with pytest.raises(TypeError, match="'num_groups' must be an int"):
        convert_batchnorm_to_groupnorm(norms_net(), True)
    with pytest.raises(TypeError, match="'network' must be a Cell, but got 'list'"):
        convert_batchnorm_to_groupnorm([nn.BatchNorm2d(4)], 2)
    with pytest.raises(ValueError, match="the layer 'BatchNorm2d' itself"):
        convert_batchnorm_to_groupnorm(nn.BatchNorm2d(4), 2)
    network = nn.SequentialCell(nn.BatchNorm1d(4))
    convert_batchnorm_to_groupnorm(network, 4)
    with pytest.raises(ValueError, match=r"shape \(3, 4\) and 4 groups. Use fewer groups"):
        network(Tensor(np.ones((3, 4), np.float32)))
