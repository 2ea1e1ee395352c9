"""Writes three reports on a network with large intermediate values to ``FILE`` : one in graph mode, one in PyNative
mode, and one with a limit below the whole batch's peak, in PyNative mode, where a trial compiles nothing. Run by
test_memory_report.py, in a new process: in an old one, a trial's memory differs by 100 MB."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import mindspore as ms
from mindspore import Tensor, nn
from support.reference import FEATURES, OPTIMIZERS, batches

from gaccum_ms import GradAccumulationCell, memory_report
from gaccum_ms.memory.report import MemoryReport

HIDDEN = 100_000
SAMPLES = 256
BELOW = 70_000_000  # bytes


class Wide(nn.Cell):
    """Intermediate values of more than 1 MB for each sample: a few samples are enough to measure."""

    def __init__(self):
        super().__init__()
        self.layers = nn.SequentialCell(nn.Dense(FEATURES, HIDDEN), nn.Tanh(), nn.Dense(HIDDEN, 5))

    def construct(self, x):
        return self.layers(x)


def report(**arguments) -> MemoryReport:
    network = Wide()
    cell = GradAccumulationCell(nn.WithLossCell(network, nn.CrossEntropyLoss()), 2)
    batch = [Tensor(value) for value in batches(SAMPLES, 1)[0]]
    return memory_report(cell, OPTIMIZERS["momentum"](network.trainable_params()), *batch, **arguments)


if __name__ == "__main__":
    ms.set_context(mode=ms.GRAPH_MODE)
    compiled = report(micro_sizes=[1, 2, SAMPLES])
    ms.set_context(mode=ms.PYNATIVE_MODE)
    eager = report(micro_sizes=[1, 2, SAMPLES])
    limited = report(micro_sizes=[1, 8, SAMPLES], memory_limit=eager.rows[0].peak - BELOW)
    Path(sys.argv[1]).write_bytes(pickle.dumps((compiled, eager, limited)))
