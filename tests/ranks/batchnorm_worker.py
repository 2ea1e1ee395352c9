"""The cases of test_window_batchnorm.py on ranks (support/ranks.py): each trains on its half of each batch."""

from __future__ import annotations

from pathlib import Path

from mindspore.communication import get_rank

from gaccum_ms import WindowBatchNorm
from tests.layers.test_window_batchnorm import data, make_step, run
from tests.support.two_ranks import Results


def pooled(out: Path) -> Results:
    rank = get_rank()
    given = [(x[rank::2], y[rank::2]) for x, y in data(12)]
    results = {"single": run(make_step(WindowBatchNorm(2), micro_size=2), given)}
    parts = [part for x, y in given for part in ((x[:3], y[:3]), (x[3:], y[3:]))]
    step = make_step(WindowBatchNorm(2), micro_size=2, accumulation_steps=2)
    results["spanning"] = run(step, parts)
    return results


CASES = dict.fromkeys(("single", "spanning"), pooled)
