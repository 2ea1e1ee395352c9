"""The cases of test_written_values.py on ranks: losses and weights, with MindSpore's step and with ours."""

from __future__ import annotations

from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore.communication import get_rank

from tests.backend.test_written_values import JOINED, WINDOWS, WRITES, Training
from tests.support.modes import MODES


def on_ranks(way: str):
    """A case: `way` is a window of `WINDOWS` , "jit", or "whole" for MindSpore's step."""

    def run_case(out: Path) -> dict[str, np.ndarray]:
        rank = get_rank()
        ms.set_context(mode=MODES["pynative" if way == "jit" else "graph"])
        window = {"whole": None, "jit": "samples"}.get(way, way)
        run = Training(window, **WINDOWS.get(window or "", {}), **({"jit": True} if way == "jit" else {}))
        folder = out / f"{way}-{rank}"
        folder.mkdir(parents=True)
        for number, (x, y) in enumerate(JOINED):
            if number >= 2:
                WRITES[number - 2](run, folder)
            run.train(np.roll(x, rank, axis=1) + rank, y)
        weights = {f"{way}/{one.name}": one.asnumpy() for one in run.both.get_parameters()}
        return {f"{way}/losses": np.array(run.losses), **weights}

    return run_case


CASES = {way: on_ranks(way) for way in ("whole", "samples", "counts", "jit")}
