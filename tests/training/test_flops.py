"""MindSpore's FlopsUtilizationCollector counts the micro-batches, which are in a loop that it does not look into."""

from __future__ import annotations

import mindspore as ms
import pytest
from mindspore import nn
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import FlopsUtilizationCollector

from gaccum_ms import GradAccumulationCell, WithBatchLossCell
from gaccum_ms.backend import flops_collector
from tests.support.reference import batches, make_network


def counted(sinks=False, network=None, **options):
    """The FLOPs of the model, with what is computed twice, and both on this device."""
    loss = None if network else nn.CrossEntropyLoss()
    network = network or make_network("dense")
    cell = GradAccumulationCell(network, **options) if options else network
    model = ms.Model(cell, loss, nn.SGD(network.trainable_params(), 0.1))
    collector = FlopsUtilizationCollector(2, computility=100)
    data_set = NumpySlicesDataset(batches(26, 1)[0], shuffle=False).batch(13)
    model.train(1, data_set, callbacks=[collector], dataset_sink_mode=sinks)
    of_all = collector.full_model_flops, collector.full_hardware_flops
    return *of_all, collector.shard_model_flops, collector.shard_hardware_flops


OF_BATCH = 13 * 2 * (2 * 12 * 16 + 3 * 16 * 5)  # the input needs no gradient


@pytest.mark.parametrize(
    ("sinks", "options"),
    [(False, {"micro_size": 4}), (True, {"micro_batch_size": 3, "accumulation_steps": 2})],
    ids=["ragged", "windows"],
)
def test_micro_batches_have_the_flops_of_the_batch(sinks, options):
    original = flops_collector.flops_collection
    assert counted(sinks, **options) == (OF_BATCH,) * 4
    assert flops_collector.flops_collection is original


class WithLabels(nn.Cell):
    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, x, y):
        return self.network(x), y


def test_a_loss_of_the_whole_batch_is_counted_without_its_second_forward():
    network = WithBatchLossCell(WithLabels(make_network("dense")), nn.CrossEntropyLoss())
    assert counted(network=network, micro_size=4) == (OF_BATCH,) * 4
