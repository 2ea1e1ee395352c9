"""Transforms on two ranks, compared with the joined batches on one process: all ranks decide alike."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.communication import get_rank

from gaccum_ms import ClipByGlobalNorm, ShardedOptimizer, SkipSpikes, WeightAverage
from tests.ranks.cases import named, set_up
from tests.support import by_hand
from tests.support.adopted import joined
from tests.support.by_hand import ByHand, train_whole
from tests.support.reference import Regression, as_numpy, batches, make_step, relative_error, vector
from tests.support.two_ranks import Results, case, results_of

pytestmark = pytest.mark.distributed
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


def test_ranks_decide_alike_and_as_one_process(ranks):
    network, both_batches = Regression(), [one for pair in zip(data(0), data(1), strict=True) for one in pair]
    optimizer = ByHand(momentum(network.trainable_params()), [by_hand.spikes(norm=NORM), by_hand.global_norm(MAX_NORM)])
    optimizer.after.append(average := by_hand.Average(optimizer.weights(), DECAY))
    rows = train_whole(network, optimizer, joined(both_batches, 2 * STEPS))
    both = [case(one, "step") for one in ranks]
    for one in both:
        assert one["updates"].tolist() == [number + (number < SPIKE) for number in range(WINDOWS)]
        assert one["skipped"] == 1
        assert max(map(relative_error, one["weights"], rows)) < 1e-5
        assert relative_error(one["averages"], np.concatenate([value.ravel() for value in average.values])) < 1e-5
        np.testing.assert_array_equal(one["swapped"], one["averages"])
    for what in ("weights", "averages", "norm"):
        np.testing.assert_array_equal(both[0][what], both[1][what])


def disagree(out: Path) -> Results:
    """The ranks' norms are on both sides of a limit, as rounding may make them. With a ShardedOptimizer, one rank that
    updates alone would wait for the other for ever."""
    set_up()
    size = 1.0 if get_rank() == 0 else 2.0

    def by_rank(gradients):
        return gradients[0] * 0.0 + size, gradients[1] * 0.0

    updates = []
    for factor in (1.4, 1.6):  # times rank 0's norm; the mean of both is 1.5 times it
        network = Regression()
        limit = float(factor * np.sqrt(network.hidden.size))
        step = make_step(network, momentum, micro_size=2, transforms=(by_rank, SkipSpikes(norm=limit)))
        step(*map(Tensor, data(get_rank())[0]))
        updates.append(int(step.update_count.asnumpy()))
    return {"disagree": np.array(updates)}


def test_ranks_whose_norms_differ_decide_by_their_mean(ranks):
    for one in ranks:
        assert one["disagree"].tolist() == [0, 1]


CASES = {"step": train, "disagree": disagree}
ranks = results_of("test_transforms_ranks")
