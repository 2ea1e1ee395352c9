"""What a rank of test_tokens_ranks.py runs (support/ranks.py): micro-batches by length, which differ in number over two
ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.communication import get_rank
from support.modes import MODES
from support.reference import as_numpy
from support.two_ranks import Results
from test_max_tokens import batch, make_step, max_tokens

SAMPLES = (6, 24)  # of a rank's batches
NUMBER = 4  # of batches
# mode, batches of a window, options
KINDS = {
    "one batch": ("graph", 1, {"max_grad_norm": 0.05}),
    "window": ("pynative", 2, {}),
}


def data_of(rank: int) -> list[tuple[np.ndarray, ...]]:
    return [batch(100 * rank + number, SAMPLES[rank]) for number in range(NUMBER)]


def play(name: str) -> Callable[[Path], Results]:
    def case(_: Path) -> Results:
        rank, (mode, steps, options) = get_rank(), KINDS[name]
        ms.set_context(mode=MODES[mode])
        ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
        split = max_tokens()
        step, numbers = make_step(split, accumulation_steps=steps, **options), []
        for one in data_of(rank):
            step(*map(Tensor, one))
            numbers.append(len(split.plan.parts))
        return {
            f"{name}/weights": np.concatenate([as_numpy(one).ravel() for one in step.weights]),
            f"{name}/updates": as_numpy(step.update_count),
            f"{name}/loss": as_numpy(step.window_loss),
            f"{name}/micro-batches": np.array(numbers),
        }

    return case


CASES = {name: play(name) for name in KINDS}
