"""Searches and trains under a limit of BYTES above the process's memory, ``OUT find|auto BYTES`` , or only trains,
``OUT alone SAMPLES`` . Run by tests/memory/test_search.py."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from support.two_ranks import leave

from gaccum_ms import AutoSize, GradAccumulationCell, TrainOneStepWithGradAccumulationCell, find_micro_batch_size
from gaccum_ms.memory.heap import keep_heap_small
from gaccum_ms.memory.proc import forget_peak, own

SAMPLES = 1024


class Pictures(nn.Cell):
    """Some 130 KB of intermediate values for each sample."""

    def __init__(self):
        super().__init__()
        self.layers = nn.SequentialCell(nn.Dense(16, 12_000), nn.Tanh(), nn.Dense(12_000, 5))

    def construct(self, x):
        return self.layers(x)


class Watch(threading.Thread):
    """Records the largest memory of this process and its children together, as the kernel reports it."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most = 0
        self.start()

    def run(self):
        while True:
            time.sleep(0.02)
            try:
                children = Path("/proc/self/task").joinpath(str(threading.main_thread().native_id), "children")
                before = own("VmRSS")
                shared_with_none = sum(private(child) for child in children.read_text().split())
                # A child that ends is read slowly. So this process is read before and after, and the smaller counts.
                self.most = max(self.most, min(before, own("VmRSS")) + shared_with_none)
            except (FileNotFoundError, ProcessLookupError):
                pass  # a child has just ended


def private(process: str) -> int:
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")) * 1024


def main(out: Path, way: str, number: int) -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    network = nn.WithLossCell(Pictures(), nn.CrossEntropyLoss())
    optimizer = nn.Adam(network.trainable_params())
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(SAMPLES, 16)).astype(np.float32), rng.integers(0, 5, SAMPLES).astype(np.int32)
    batch = [Tensor(x), Tensor(y)]
    keep_heap_small()
    forget_peak()
    before = own("VmRSS")
    limit = before + number
    results = {"before": before, "limit": limit}
    size = number
    if way == "find":
        watch = Watch()
        size = find_micro_batch_size(GradAccumulationCell(network, 1), optimizer, batch, limit)
        results |= {"search_peak": watch.most, "after_search": own("VmRSS")}
    cell = GradAccumulationCell(network, micro_batch_size=size)
    if way == "auto":
        cell = GradAccumulationCell(network, micro_batch_size=AutoSize(limit))
        watch = Watch()
    step = TrainOneStepWithGradAccumulationCell(cell, optimizer).set_train()
    for _ in range(3):
        step(*batch).asnumpy()
    if way == "auto":
        results |= {"search_peak": watch.most, "after_search": before}
    results |= {"size": step.micro_batch_size, "training_peak": own("VmHWM")}
    leave(out, 0, {name: np.array(value) for name, value in results.items()})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
