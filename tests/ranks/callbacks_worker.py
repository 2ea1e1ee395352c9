"""The cases of callbacks on ranks (support/ranks.py): windows that adapt to the noise over two ranks, and a training
with a bar in a file."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.communication import get_rank

from gaccum_ms import AdaptiveAccumulation, FlushAccumulation, GradAccumulationCell, ProgressBar
from tests.callbacks.test_adaptive import fit, steps_of
from tests.support.reference import Line, as_numpy
from tests.support.two_ranks import Results


class Astray(AdaptiveAccumulation):
    """Finds ten times the noise on rank 1."""

    def on_window_end(self, run_context, record):
        if get_rank() == 1:
            noise = record.noise._replace(squares=10 * record.noise.squares)
            record = dataclasses.replace(record, noise=noise)
        super().on_window_end(run_context, record)


def follow(out: Path) -> Results:
    results = {}
    for name, kind in (("follow", AdaptiveAccumulation), ("astray", Astray)):
        callback = kind(max_steps=3, smoothing=0.999)
        step = fit(callback, samples=1600, rate=1e-3, seed=get_rank())
        results |= {
            f"{name}/steps": steps_of(callback),
            f"{name}/rates": [record.learning_rate for record in callback.records],
            f"{name}/weight": as_numpy(step.weights[0]),
            f"{name}/scale": callback.noise_scale,
        }
    try:
        callbacks = [FlushAccumulation()]
        fit(AdaptiveAccumulation(), samples=8 * (3 - get_rank()), accumulation_steps=2, callbacks=callbacks)
    except ValueError as error:
        results["uneven/message"] = str(error)
    return results


def drawn(out: Path) -> Results:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    cell = GradAccumulationCell(Line(1.0), accumulation_steps=2)
    model = ms.Model(cell, optimizer=nn.SGD(cell.trainable_params(), 0.01))
    values = np.arange(8, dtype=np.float32) / 8
    data = ms.dataset.NumpySlicesDataset((values, values), shuffle=False).batch(2)
    file = io.StringIO()
    model.train(2, data, callbacks=[ProgressBar(file, show=True, refresh_seconds=0)])
    return {"drawn": np.array(file.getvalue())}


CASES = {**dict.fromkeys(("follow", "astray", "uneven"), follow), "drawn": drawn}
