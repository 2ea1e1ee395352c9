"""The case of test_tokens_ranks.py on ranks (support/ranks.py): micro-batches by length, different in number on two
ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from mindspore import Tensor
from mindspore.communication import get_rank

from tests.ranks.cases import named, set_up
from tests.splitting.test_max_tokens import batch, step_of
from tests.support.reference import as_numpy, vector
from tests.support.two_ranks import Results

NUMBER, STEPS = 4, 2  # batches of each rank, and of a window


def data_of(rank: int) -> list[tuple[np.ndarray, ...]]:
    return [batch(100 * rank + number, (6, 24)[rank]) for number in range(NUMBER)]


def window(out: Path) -> Results:
    set_up()
    step, numbers = step_of(accumulation_steps=STEPS), []
    for one in data_of(get_rank()):
        step(*map(Tensor, one))
        numbers.append(len(step.split.plan.parts))
    found = {"weights": vector(step.weights), "updates": as_numpy(step.update_count)}
    return named("window", found | {"loss": as_numpy(step.window_loss), "micro-batches": numbers})


CASES = {"window": window}
