"""A training in which memory really runs out: this process's address space is limited. Run by test_auto_size.py."""

from __future__ import annotations

import re
import resource
import sys
import warnings
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from support.reference import as_numpy
from support.two_ranks import leave

from gaccum_ms import AutoSize, GradAccumulationCell, TrainOneStepWithGradAccumulationCell
from gaccum_ms.backend.out_of_memory import is_out_of_memory

HEADROOM = 900_000_000


class FourthPower(nn.Cell):
    """Computes a tensor of 64 bytes times the features times the fourth power of the samples: 67 MB for 32 samples of
    one feature, and 1.07 GB for 32 samples of sixteen, which is more than there is. It is a single tensor, because
    MindSpore keeps the memory of smaller ones if a later one fails."""

    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor(np.linspace(1, 2, 16), ms.float32), name="weight")

    def construct(self, x):
        tiled = ops.tile(self.weight, (x.shape[0] ** 4 * x.shape[1],))
        return tiled.mean() * x.mean() + 0.5 * ops.square(self.weight).sum()


def main(out: Path) -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    network = FourthPower()
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    errors, sizes = [], []

    def notes_and_says(error: BaseException) -> bool:
        errors.append(repr(error)[:300])
        return is_out_of_memory(error)

    cell = GradAccumulationCell(network, micro_batch_size=AutoSize(1 << 50, notes_and_says))
    step = TrainOneStepWithGradAccumulationCell(cell, optimizer).set_train()
    batches = [np.full((32, features), 0.1 * features, np.float32) for features in (1, 1, 16, 16)]
    expected, moment = as_numpy(network.weight), 0.0
    for number, batch in enumerate(batches):
        if number == 2:
            held = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
            resource.setrlimit(resource.RLIMIT_AS, (held + HEADROOM, held + HEADROOM))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "For 'GradAccumulationCell', memory ran out")
            step(Tensor(batch)).asnumpy()
        sizes.append(step.micro_batch_size)
        moment = 0.9 * moment + batch.mean() / 16 + expected
        expected = expected - 0.1 * moment
    results = {"sizes": sizes, "errors": errors, "weights": as_numpy(network.weight), "expected": expected}
    leave(out, 0, {name: np.array(value) for name, value in results.items()})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
