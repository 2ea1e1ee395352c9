"""One rank of tests/test_noise_record.py: records of the gradient noise over two ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.communication import get_rank, init
from test_noise_record import make_step, noise_of, targets
from two_ranks import leave

from gaccum_ms import CountMask


def main(out: Path, gradients_mean: bool) -> None:
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    init()
    rank = get_rank()
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=gradients_mean)
    y, mask = targets(16), np.array([1, 0.5, 0, 0, 1, 1, 0, 2] * 2, np.float32)
    results = {}
    half, part = np.split(y, 2)[rank], slice(0, 6) if rank == 0 else slice(6, 16)
    for name, options, batches in (
        ("samples", {"micro_size": 4}, [half]),
        ("uneven", {"micro_batch_size": 2 + rank}, [y[part]]),
        ("one each", {"micro_size": 1}, [half]),
        ("spanning", {"micro_size": 4, "accumulation_steps": 2}, [half, half + 1]),
    ):
        step = make_step(**options)
        for batch in batches:
            step(Tensor(batch))
        results[f"{name}/noise"] = noise_of(step)
    step = make_step(micro_batch_size=2, count=CountMask())
    step(Tensor(y[part]), Tensor(mask[part]))
    results["counted/noise"] = noise_of(step)
    leave(out, rank, results)


main(Path(sys.argv[1]), bool(int(sys.argv[2])))
