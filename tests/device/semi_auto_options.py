"""Trains with each option that semi-auto parallel mode has, and saves the weights: ``semi_auto_options.py FILE`` .

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
    EvenSplit,
    GradAccumulationCell,
    PerSampleLoss,
    SkipSpikes,
    TrainOneStepWithGradAccumulationCell,
    WeightAverage,
    resume,
)
from gaccum_ms.distributed.stages import owned_weights, stages

SAMPLES, BATCHES = 64, 4


class Network(nn.Cell):
    """Two layers and a loss in the form that `kind` names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        random = np.random.default_rng(0)
        first, second = (ms.Tensor(random.normal(size=shape) / 4, ms.float32) for shape in ((12, 16), (1, 12)))
        self.first, self.second = nn.Dense(16, 12, first, "zeros"), nn.Dense(12, 1, second, "zeros")
        self.relu = nn.ReLU()
        self.kind = kind

    def construct(self, x, y, factor=1.0):
        out = self.second(self.relu(self.first(x)))
        errors = ops.square(out - y * factor)
        loss = errors.mean()
        if self.kind in ("ratio", "shared"):
            positive = ops.cast(y > 0, ms.float32)
            loss = ((errors * positive).sum(), positive.sum())
        elif self.kind == "two losses":
            loss = (loss, ops.square(out).mean())
        elif self.kind == "per sample":
            loss = errors
        elif self.kind == "aux":
            loss = (loss, ops.abs(out).mean(), out)
        return loss


class Staged(nn.Cell):
    """Four layers on so many stages."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        random, widths = np.random.default_rng(0), (16, 12, 12, 12, 1)
        shapes = list(zip(widths[1:], widths, strict=False))
        weights = [ms.Tensor(random.normal(size=shape) / 4, ms.float32) for shape in shapes]
        layers = [nn.Dense(*shape[::-1], weight, "zeros") for shape, weight in zip(shapes, weights, strict=True)]
        for number, layer in enumerate(layers):
            layer.pipeline_stage = number * stages // len(layers)
        self.layers, self.relu = nn.CellList(layers), ops.ReLU()

    def construct(self, x, y):
        for layer in self.layers[:-1]:
            x = self.relu(layer(x))
        positive = ops.cast(y > 0, ms.float32)
        return (ops.square(self.layers[-1](x) - y) * positive).sum(), positive.sum()


def samples(x, y, *others):
    return x.shape[0]


STAGES = {"two stages": 2, "four stages": 4}


OPTIONS = {
    "ratio": {"reduction": "ratio", "min_count": 1.0, "max_grad_norm": 0.5},
    "shared": {"reduction": "ratio", "split": EvenSplit(shared=(2,))},
    "two losses": {"loss_weights": (1.0, 0.5), "count": (samples, samples)},
    "aux": {"aux": True, "count": samples},
    "windows": {"accumulation_steps": 3, "count": samples},
    "transforms": {"transforms": (SkipSpikes(norm=100.0), ClipByGlobalNorm(0.5), ClipByValue(0.1), WeightAverage(0.9))},
    "casts": {},
    "overflow": {"count": samples, "max_grad_norm": 0.5},
    "per sample": {},
    "resume": {"accumulation_steps": 2, "count": samples},
    **{kind: {"reduction": "ratio", "max_grad_norm": 0.5} for kind in STAGES},
}


def make_step(kind: str) -> TrainOneStepWithGradAccumulationCell:
    network = Staged(STAGES[kind]) if kind in STAGES else Network(kind)
    if kind == "casts":
        network.to_float(ms.float16)
    cell = GradAccumulationCell(PerSampleLoss(network) if kind == "per sample" else network, 4, **OPTIONS[kind])
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
        if kind == "resume" and number == BATCHES // 2:
            ms.save_checkpoint(step, file)
            step = make_step(kind)
            resume(step, file)
        x = random.normal(size=(SAMPLES, 16)).astype(np.float32)
        if kind == "overflow" and number == 1:
            x[3] = np.inf  # a sample of one rank: no rank may update
        batch = [x, x[:, :1] + x[:, 1:2] ** 2 - 1]
        batch = [np.split(array, ranks)[rank] for array in batch]
        if kind == "shared":
            batch.append(np.full((1, 1), 2.0, np.float32))
        step(*map(ms.Tensor, batch))
    step.flush()
    weights = step.weights
    owned = owned_weights(step.network, weights) if stages() > 1 else (True,) * len(weights)
    return {f"{kind}/{weight.name}": weight.asnumpy() for weight, own in zip(weights, owned, strict=True) if own}


def main() -> None:
    device = os.environ.get("DEVICE", "CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device(device)
    rank, ranks = 0, 1
    if "MS_ROLE" in os.environ:
        init()
        rank, ranks = get_rank(), get_group_size()
    weights = {}
    for kind in OPTIONS:
        pipeline = {"pipeline_stages": STAGES[kind]} if kind in STAGES else {}
        if pipeline and device != "CPU" and ranks > 1 and ranks % STAGES[kind]:
            continue  # too few devices
        if (kind, device) == ("casts", "GPU"):
            continue  # refused there in semi-auto parallel mode
        if ranks > 1 and device == "CPU":
            ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
        elif ranks > 1:
            shared = {"dataset_strategy": ((ranks, 1), (ranks, 1), (1, 1))} if kind == "shared" else {}
            ms.reset_auto_parallel_context()
            ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", gradients_mean=False, **shared, **pipeline)
        weights |= train(kind, rank, ranks, f"{sys.argv[1]}.{rank}.ckpt")
    np.savez(f"{sys.argv[1]}.{rank}.npz", **weights)


if __name__ == "__main__":
    main()
