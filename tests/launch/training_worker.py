"""A rank that trains in data parallel mode, and does not wait for the others at its end.

    python -m gaccum_ms.launch -n 2 training_worker.py OUT STEPS MODE [FAILING_RANK]

It writes its process id and its last step to OUT/<N> during training, for tests that kill it, and the sum of its
weights to OUT/rank<N> at the end. FAILING_RANK raises at step 5, when the others are in that step's AllReduce.
"""

import os
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank, init

from gaccum_ms import GradAccumulationCell, TrainOneStepWithGradAccumulationCell


def main(out, steps, mode, failing_rank=-1):
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    ms.set_seed(1)
    init()
    rank = get_rank()
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    net = nn.Dense(4, 1)
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), 2)
    step = TrainOneStepWithGradAccumulationCell(cell, optimizer)
    random = np.random.default_rng(rank)
    for number in range(int(steps)):
        if rank == int(failing_rank) and number == 5:
            raise ValueError(f"no step {number} on rank {rank}")
        x = random.normal(size=(6, 4)).astype(np.float32)
        step(ms.Tensor(x), ms.Tensor(x.sum(axis=1, keepdims=True)))
        fresh = Path(out) / f".{rank}"
        fresh.write_text(f"{os.getpid()} {number}")
        fresh.rename(Path(out) / f"{rank}")
    total = sum(float(ops.sum(parameter).asnumpy()) for parameter in net.trainable_params())
    (Path(out) / f"rank{rank}").write_text(f"{get_group_size()} {total!r}")


main(*sys.argv[1:])
