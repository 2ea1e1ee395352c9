"""How many files a reader opens who follows one step from `Model.train` to the optimizer."""

from __future__ import annotations

import sys
from pathlib import Path

import mindspore as ms
from mindspore import nn
from mindspore.train import LambdaCallback

import gaccum_ms
from tests.support.reference import batches, make_network, make_step

PACKAGE = Path(gaccum_ms.__file__).parent


def test_a_later_step_passes_through_at_most_nine_files():
    """From the second batch to the end of the third, the files of the package whose functions Python calls."""
    files = set()

    def note(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            files.add(path.relative_to(PACKAGE).as_posix())

    def profile(run_context, batch, function):
        if run_context.original_args().cur_step_num == batch:
            sys.setprofile(function)

    callback = LambdaCallback(
        on_train_step_begin=lambda run_context: profile(run_context, 2, note),
        on_train_step_end=lambda run_context: profile(run_context, 3, None),
    )
    step = make_step(nn.WithLossCell(make_network("dense"), nn.CrossEntropyLoss()), micro_size=4)
    data_set = ms.dataset.NumpySlicesDataset(batches(24, 1)[0], shuffle=False).batch(8)
    ms.Model(step).train(1, data_set, callbacks=[callback])
    files = {file for file in files if not file.startswith("backend/")}
    assert "training/step.py" in files
    assert len(files) <= 9, sorted(files)
