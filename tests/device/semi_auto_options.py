"""Trains with options that semi-auto parallel mode has, and saves the weights: ``semi_auto_options.py FILE [KIND...]`` .

Several ranks train in that mode on devices that have it, and in data parallel mode on CPU. One process trains on all
samples.
"""

from __future__ import annotations

import os
import sys

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank, init

from gaccum_ms import (
    ClipByGlobalNorm,
    ClipByValue,
    GradAccumulationCell,
    SkipSpikes,
    TrainOneStepWithGradAccumulationCell,
    WeightAverage,
    resume,
)
from gaccum_ms.distributed.stages import owned_weights, stages

SAMPLES, BATCHES = 64, 4


class Network(nn.Cell):
    """Four layers on so many stages, and a loss with its count."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        random, widths = np.random.default_rng(0), (16, 12, 12, 12, 1)
        shapes = list(zip(widths[1:], widths, strict=False))
        weights = [ms.Tensor(random.normal(size=shape) / 4, ms.float32) for shape in shapes]
        layers = [nn.Dense(*shape[::-1], weight, "zeros") for shape, weight in zip(shapes, weights, strict=True)]
        for number, layer in enumerate(layers if stages else ()):
            layer.pipeline_stage = number * stages // len(layers)
        self.layers, self.relu = nn.CellList(layers), ops.ReLU()

    def construct(self, x, y):
        for layer in self.layers[:-1]:
            x = self.relu(layer(x))
        positive = ops.cast(y > 0, ms.float32)
        return (ops.square(self.layers[-1](x) - y) * positive).sum(), positive.sum()


STAGES = {"two stages": 2, "four stages": 4}


OPTIONS = {
    "ratio": {"min_count": 1.0},
    "windows": {"accumulation_steps": 3},
    "transforms": {"transforms": (SkipSpikes(norm=100.0), ClipByGlobalNorm(0.5), ClipByValue(0.1), WeightAverage(0.9))},
    "overflow": {"max_grad_norm": 0.5},
    **{kind: {"max_grad_norm": 0.5} for kind in STAGES},
}


def make_step(kind: str) -> TrainOneStepWithGradAccumulationCell:
    network = Network(STAGES.get(kind, 0))
    cell = GradAccumulationCell(network, 4, reduction="ratio", **OPTIONS[kind])
    optimizer = nn.Momentum(network.trainable_params(), 0.05, 0.9)
    scale = nn.DynamicLossScaleUpdateCell(1024.0, 2, 2) if kind == "overflow" else None
    return TrainOneStepWithGradAccumulationCell(cell, optimizer, scale).set_train()


def train(kind: str, rank: int, ranks: int, file: str) -> dict[str, np.ndarray]:
    """The weights after all batches of this rank, and after the flush of an open window: in a pipeline, those of its
    stage."""
    rank, ranks = rank % (ranks // stages()), ranks // stages()
    step = make_step(kind)
    random = np.random.default_rng(1)
    for number in range(BATCHES):
        if kind == "windows" and number == BATCHES // 2:
            ms.save_checkpoint(step, file)
            step = make_step(kind)
            resume(step, file)
        x = random.normal(size=(SAMPLES, 16)).astype(np.float32)
        if kind == "overflow" and number == 1:
            x[3] = np.inf  # a sample of one rank: no rank may update
        batch = [x, x[:, :1] + x[:, 1:2] ** 2 - 1]
        step(*(ms.Tensor(np.split(array, ranks)[rank]) for array in batch))
    step.flush()
    weights = step.weights
    owned = owned_weights(step.network, weights) if stages() > 1 else (True,) * len(weights)
    return {f"{kind}/{weight.name}": weight.asnumpy() for weight, own in zip(weights, owned, strict=True) if own}


def main() -> None:
    device = os.environ.get("DEVICE", "CPU")
    ms.set_context(mode=ms.PYNATIVE_MODE if device == "CPU" else ms.GRAPH_MODE)
    ms.set_device(device)
    rank, ranks = 0, 1
    if "MS_ROLE" in os.environ:
        init()
        rank, ranks = get_rank(), get_group_size()
    weights = {}
    for kind in sys.argv[2:] or OPTIONS:
        pipeline = {"pipeline_stages": STAGES[kind]} if kind in STAGES else {}
        if pipeline and device != "CPU" and ranks > 1 and ranks % STAGES[kind]:
            continue  # too few devices
        if ranks > 1 and device == "CPU":
            ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
        elif ranks > 1:
            ms.reset_auto_parallel_context()
            ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", gradients_mean=False, **pipeline)
        weights |= train(kind, rank, ranks, f"{sys.argv[1]}.{rank}.ckpt")
    np.savez(f"{sys.argv[1]}.{rank}.npz", **weights)


if __name__ == "__main__":
    main()
