"""The cases of test_transforms_ranks.py on ranks (support/ranks.py): transforms, with part of each batch on each
rank."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import get_rank

from gaccum_ms import ClipByGlobalNorm, ShardedOptimizer, SkipSpikes, WeightAverage
from tests.ranks.cases import named, set_up
from tests.support.reference import Regression, as_numpy, batches, make_step, vector
from tests.support.two_ranks import Results

RATE, DECAY, NORM, MAX_NORM = 0.05, 0.5, 3.0, 0.3
SPIKE = 2  # the window whose targets are far off, on rank 1 alone
WINDOWS, STEPS, SAMPLES = 5, 2, 6


def data(rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """A rank's batches."""
    result = []
    for number, (x, y) in enumerate(batches(SAMPLES, WINDOWS * STEPS, seed=40 + rank)):
        far = rank == 1 and number // STEPS == SPIKE
        result.append((x, (y * (100 if far else 1)).astype(np.float32)))
    return result


def momentum(weights: Any) -> nn.Optimizer:
    return nn.Momentum(weights, RATE, 0.9)


def train(out: Path) -> Results:
    """Windows of two batches, compiled, with a sharded optimizer: the weights and the number of updates after each
    window, and the rest at the end."""
    chain = SkipSpikes(norm=NORM), ClipByGlobalNorm(MAX_NORM), WeightAverage(DECAY)
    sharded, rows, updates = functools.partial(ShardedOptimizer, nn.Momentum, learning_rate=RATE, momentum=0.9), [], []
    step = make_step(Regression(), sharded, micro_size=2, accumulation_steps=STEPS, transforms=chain)
    for number, batch in enumerate(data(get_rank()), start=1):
        step(*map(Tensor, batch))
        if number % STEPS == 0:
            rows.append(vector(step.optimizer.parameters))
            updates.append(int(step.update_count.asnumpy()))
    with step.averaged_weights():
        swapped = vector(step.weights)
    found = {"weights": rows, "updates": updates, "averages": vector(chain[-1].averages), "swapped": swapped}
    return named("step", found | {"skipped": as_numpy(step.skipped_updates), "norm": as_numpy(step.judged_norm)})


def disagree(out: Path) -> Results:
    """The ranks' norms are on both sides of a limit, as rounding may make them. With a ShardedOptimizer, one rank that
    updates alone would wait for the other for ever."""
    set_up()
    size = 1.0 if get_rank() == 0 else 2.0

    def by_rank(gradients):
        return gradients[0] * 0.0 + size, gradients[1] * 0.0

    results = {}
    for name, factor in (("below", 1.4), ("above", 1.6)):  # times rank 0's norm; the mean of both is 1.5 times it
        network = Regression()
        limit = float(factor * np.sqrt(network.hidden.size))
        step = make_step(network, momentum, micro_size=2, transforms=(by_rank, SkipSpikes(norm=limit)))
        step(*map(Tensor, data(get_rank())[0]))
        results[name] = as_numpy(step.update_count)
    return named("disagree", results)


CASES = {"step": train, "disagree": disagree}
