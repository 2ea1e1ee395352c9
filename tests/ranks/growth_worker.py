"""The cases of test_growth_ranks.py on ranks: bytes a batch by which each rank grows."""

from __future__ import annotations

import numpy as np

from tests.support.two_ranks import Results
from tests.training import test_memory_growth as ways

WAYS = {
    "windows": lambda: ways.a_step(accumulation_steps=2),
    "one batch": lambda: ways.a_step(micro_size=3),
    "count": lambda: ways.a_step(count=ways.positive, accumulation_steps=2, max_grad_norm=1.0),
    "scale": lambda: ways.a_step(scale_sense=ways.manager, batches=ways.overflowing(), accumulation_steps=2),
    "several losses": lambda: ways.a_step("several", loss_weights=(1.0, 0.5), count=(ways.positive, ways.positive)),
    "split": lambda: ways.a_step(split=ways.by_sample, micro_size=None),
    "accumulator": ways.an_accumulator,
}


def grow(way: str) -> Results:
    return {f"{way}/growth": np.array(ways.growth(WAYS[way]()))}


CASES = {way: lambda out, name=way: grow(name) for way in WAYS}
