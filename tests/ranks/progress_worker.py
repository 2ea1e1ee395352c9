"""The cases of test_progress.py on ranks (support/ranks.py): trainings with a bar in a file, for the test."""

from __future__ import annotations

import io
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn

from gaccum_ms import GradAccumulationCell, ProgressBar
from tests.support.reference import Line
from tests.support.two_ranks import Results


def drawn(out: Path) -> Results:
    cell = GradAccumulationCell(Line(1.0), accumulation_steps=2)
    model = ms.Model(cell, optimizer=nn.SGD(cell.trainable_params(), 0.01))
    values = np.arange(8, dtype=np.float32) / 8
    data = ms.dataset.NumpySlicesDataset((values, values), shuffle=False).batch(2)
    file = io.StringIO()
    model.train(2, data, callbacks=[ProgressBar(file, show=True, refresh_seconds=0)])
    return {"drawn": np.array(file.getvalue())}


CASES = {"drawn": drawn}
