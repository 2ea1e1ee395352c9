"""How many files a reader opens who follows one step from `Model.train` to the optimizer."""

from __future__ import annotations

import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.train import Callback

import gaccum_ms
from gaccum_ms import GradAccumulationCell

PACKAGE = Path(gaccum_ms.__file__).parent


class FilesOfCalls(Callback):
    """Notes the files of the package whose functions Python calls from the second batch to the end of the third."""

    def __init__(self):
        super().__init__()
        self.files = set()

    def on_train_step_begin(self, run_context):
        if run_context.original_args().cur_step_num == 2:
            sys.setprofile(self._note)

    def on_train_step_end(self, run_context):
        if run_context.original_args().cur_step_num == 3:
            sys.setprofile(None)

    def _note(self, frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            self.files.add(path.relative_to(PACKAGE).as_posix())


def test_a_later_step_passes_through_at_most_nine_files():
    net = nn.Dense(3, 1)
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), 4)
    x = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)  # of equal samples the loss shows nothing
    y = np.zeros((24, 1), np.float32)
    data_set = ms.dataset.NumpySlicesDataset((x, y), shuffle=False).batch(8)
    calls = FilesOfCalls()
    ms.Model(cell, optimizer=optimizer).train(1, data_set, callbacks=[calls])
    files = {file for file in calls.files if not file.startswith("backend/")}
    assert "training/step.py" in files
    assert len(files) <= 9, sorted(files)
