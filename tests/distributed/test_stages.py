"""The stage of each weight in a pipeline, without one."""

from __future__ import annotations

from mindspore import nn

from gaccum_ms.distributed.stages import stages_of_weights


def test_a_weight_belongs_to_the_first_stage_that_uses_it():
    layers = [nn.Dense(2, 2, has_bias=False) for _ in range(3)]
    layers[2].weight = layers[0].weight
    network = nn.SequentialCell(nn.SequentialCell(layers[0]), layers[1], layers[2])
    names = [layers[0].weight.name, layers[1].weight.name]
    assert list(map(stages_of_weights(network).get, names)) == [-1, -1]
    for stages, expected in (((0, 1, 1), [0, 1]), ((1, 0, 0), [0, 0])):
        network[0].pipeline_stage, layers[1].pipeline_stage, layers[2].pipeline_stage = stages
        assert list(map(stages_of_weights(network).get, names)) == expected
