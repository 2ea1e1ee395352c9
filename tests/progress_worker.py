"""One rank of tests/test_progress.py: it trains with a bar that writes where a test can read it."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.communication import get_rank, init
from reference import Line
from two_ranks import leave

from gaccum_ms import GradAccumulationCell, ProgressBar


def main(out: Path) -> None:
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE)
    init()
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    cell = GradAccumulationCell(Line(1.0), accumulation_steps=2)
    model = ms.Model(cell, optimizer=nn.SGD(cell.trainable_params(), 0.01))
    values = np.arange(8, dtype=np.float32) / 8
    data = ms.dataset.NumpySlicesDataset((values, values), shuffle=False).batch(2)
    file = io.StringIO()
    model.train(2, data, callbacks=[ProgressBar(file, show=True, refresh_seconds=0)])
    leave(out, get_rank(), {"drawn": np.array(file.getvalue())})


main(Path(sys.argv[1]))
