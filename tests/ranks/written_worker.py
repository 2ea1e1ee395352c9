"""The cases of test_written_values.py on ranks: losses and weights, with MindSpore's step and with ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from mindspore.communication import get_rank

from tests.backend.test_written_values import JOINED, WRITES, Training
from tests.support.two_ranks import Results


def on_ranks(name: str, window: str | None) -> Callable[[Path], Results]:
    """A case: a training in windows of this kind, or by MindSpore's step."""

    def run_case(out: Path) -> Results:
        rank, run = get_rank(), Training(window)
        folder = out / f"{name}-{rank}"
        folder.mkdir(parents=True)
        for number, (x, y) in enumerate(JOINED):
            if number >= 2:
                WRITES[number - 2](run, folder)
            run.train(np.roll(x, rank, axis=1) + rank, y)
        weights = {f"{name}/{parameter.name}": parameter.asnumpy() for parameter in run.both.get_parameters()}
        return {f"{name}/losses": np.array(run.losses), **weights}

    return run_case


CASES = {"whole": on_ranks("whole", None), "counts": on_ranks("counts", "counts")}
