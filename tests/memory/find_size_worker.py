"""A search in which memory really runs out, because this process's address space is limited. Run by test_search.py."""

from __future__ import annotations

import json
import re
import resource
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from support.reference import as_numpy

from gaccum_ms import GradAccumulationCell, TrainOneStepWithGradAccumulationCell, find_micro_batch_size

SAMPLES = 64
HEADROOM = 900_000_000


class FourthPower(nn.Cell):
    """A tensor of 64 bytes times the fourth power of the samples: 67 MB for 32 samples, and more than the limit for 64.
    It is one allocation: if one of many smaller allocations failed, MindSpore would keep the others."""

    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor(np.ones(16), ms.float32), name="weight")

    def construct(self, x):
        return ops.tile(self.weight, (x.shape[0] ** 4,)).mean() * x.mean()


def main() -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    network = FourthPower()
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    batch = [Tensor(np.ones((SAMPLES, 1), np.float32))]
    cell = GradAccumulationCell(network, 1)
    TrainOneStepWithGradAccumulationCell(cell, optimizer).set_train()(batch[0][:4])  # for MindSpore's pool and threads
    before = {one.name: as_numpy(one) for one in (*optimizer.get_parameters(), network.weight)}
    held = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (held + HEADROOM, held + HEADROOM))
    errors = []

    def is_out_of_memory(error: BaseException) -> bool:
        from gaccum_ms.backend.out_of_memory import is_out_of_memory as says_so

        errors.append(repr(error))
        return says_so(error)

    size = find_micro_batch_size(cell, optimizer, batch, memory_limit=1 << 50, is_out_of_memory=is_out_of_memory)
    unchanged = all((as_numpy(one) == before[one.name]).all() for one in (*optimizer.get_parameters(), network.weight))
    step = TrainOneStepWithGradAccumulationCell(GradAccumulationCell(network, micro_batch_size=size), optimizer)
    loss = float(step.set_train()(*batch).asnumpy())
    print(json.dumps({"size": size, "errors": errors, "unchanged": unchanged, "loss": loss}))


if __name__ == "__main__":
    main()
