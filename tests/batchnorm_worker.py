"""One rank of tests/test_window_batchnorm.py: each trains on its half of each batch."""

from __future__ import annotations

import sys
from pathlib import Path

import mindspore as ms
from mindspore.communication import get_rank, init
from test_window_batchnorm import data, make_step, run
from two_ranks import leave

from gaccum_ms import WindowBatchNorm


def main(out: Path) -> None:
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    init()
    rank = get_rank()
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    given = [(x[rank::2], y[rank::2]) for x, y in data(12)]
    results = {"single": run(make_step(WindowBatchNorm(2), micro_size=2), given)}
    parts = [part for x, y in given for part in ((x[:4], y[:4]), (x[4:], y[4:]))]
    step = make_step(WindowBatchNorm(2), micro_size=2, accumulation_steps=2)
    results["spanning"] = run(step, parts)
    leave(out, rank, results)


main(Path(sys.argv[1]))
