"""The cases of test_transforms_ranks.py on ranks (support/ranks.py): transforms, with part of each batch on each
rank."""

from __future__ import annotations

import functools
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import get_rank

from gaccum_ms import (
    ClipByGlobalNorm,
    GradAccumulationCell,
    GradAccumulator,
    ShardedOptimizer,
    SkipSpikes,
    TrainOneStepWithGradAccumulationCell,
    WeightAverage,
    resume,
)
from tests.support import reference
from tests.support.modes import MODES
from tests.support.reference import Regression, as_numpy, batches, vector
from tests.support.two_ranks import Results

RATE, DECAY, NORM, MAX_NORM = 0.05, 0.5, 3.0, 0.3
SPIKE = 2  # the window whose targets are far off, on rank 1 alone
WINDOWS, STEPS, SAMPLES = 5, 2, 6
SAVED = 5  # batches before the checkpoint: the middle of window SPIKE


def data(rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """A rank's batches."""
    result = []
    for number, (x, y) in enumerate(batches(SAMPLES, WINDOWS * STEPS, seed=40 + rank)):
        far = rank == 1 and number // STEPS == SPIKE
        result.append((x, (y * (100 if far else 1)).astype(np.float32)))
    return result


def momentum(network: nn.Cell, sharded: bool) -> nn.Optimizer:
    make = functools.partial(ShardedOptimizer, nn.Momentum) if sharded else nn.Momentum
    return make(network.trainable_params(), RATE, 0.9)


def set_up(mode: str) -> None:
    ms.set_context(mode=MODES[mode])
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)


def make_step(sharded: bool = False) -> TrainOneStepWithGradAccumulationCell:
    """A step whose transforms are a judge, a clip and an average."""
    network = Regression()
    chain = SkipSpikes(norm=NORM), ClipByGlobalNorm(MAX_NORM), WeightAverage(DECAY)
    options = {"micro_size": 2, "accumulation_steps": STEPS, "transforms": chain}
    return reference.make_step(network, lambda weights: momentum(network, sharded), **options)


def left(step: TrainOneStepWithGradAccumulationCell) -> Results:
    """The state of the weights and of the transforms after training."""
    average = step.update.links[-1]
    with step.averaged_weights():
        swapped = vector(step.weights)
    return {
        "weights": vector(step.weights),
        "averages": vector(average.averages),
        "swapped": swapped,
        "averaged": as_numpy(average.averaged_updates),
        "skipped": as_numpy(step.skipped_updates),
        "updates": as_numpy(step.update_count),
    }


def file_of(out: Path, who: int | str) -> str:
    """The checkpoint of a rank, or of the process "alone", after the batches `SAVED` ."""
    return str(out / f"transforms-{who}.ckpt")


def go_on(out: Path) -> Results:
    """Two ranks finish the training that one process has begun."""
    set_up("pynative")
    step = make_step()
    resume(step, file_of(out, "alone"))
    for batch in data(get_rank())[SAVED:]:
        step(*map(Tensor, batch))
    return {f"from one process/{key}": value for key, value in left(step).items()}


def train(out: Path) -> Results:
    """Windows of two batches, with a sharded optimizer."""
    set_up("graph")
    step = make_step(sharded=True)
    average = step.update.links[-1]
    rows, updates = [], []
    for number, batch in enumerate(data(get_rank()), start=1):
        step(*map(Tensor, batch))
        if number == SAVED:
            with step.optimizer.whole_state():
                ms.save_checkpoint(step, file_of(out, get_rank()))
        if number % STEPS == 0:
            rows.append(vector(step.weights))
            updates.append(int(step.update_count.asnumpy()))
    with step.averaged_weights():
        swapped = vector(step.weights)
    return {
        "step/weights": np.stack(rows),
        "step/updates": np.array(updates),
        "step/skipped": as_numpy(step.skipped_updates),
        "step/norm": as_numpy(step.judged_norm),
        "step/averages": vector(average.averages),
        "step/swapped": swapped,
    }


def disagree(out: Path) -> Results:
    """The ranks' norms are on both sides of a limit, as rounding may make them. With a ShardedOptimizer, one rank that
    updates alone would wait for the other for ever."""
    set_up("pynative")
    size = 1.0 if get_rank() == 0 else 2.0

    def by_rank(gradients):
        return gradients[0] * 0.0 + size, gradients[1] * 0.0

    results = {}
    for name, factor in (("below", 1.4), ("above", 1.6)):  # times rank 0's norm; the mean of both is 1.5 times it
        network = Regression()
        limit = float(factor * np.sqrt(network.hidden.size))
        cell = GradAccumulationCell(network, 2, transforms=(by_rank, SkipSpikes(norm=limit)))
        step = TrainOneStepWithGradAccumulationCell(cell, momentum(network, False)).set_train()
        step(*map(Tensor, data(get_rank())[0]))
        results[f"disagree/{name}"] = as_numpy(step.update_count)
    return results


def accumulate(out: Path) -> Results:
    """The same transforms in a hand-written loop."""
    set_up("pynative")
    network, average = Regression(), WeightAverage(DECAY)
    optimizer = momentum(network, False)
    transforms = (SkipSpikes(norm=NORM), ClipByGlobalNorm(MAX_NORM), average)
    accumulator = GradAccumulator(optimizer, 2, transforms=transforms, jit=False)
    grad_fn = ms.value_and_grad(network, None, optimizer.parameters)
    rows, updates = [], []
    for number, batch in enumerate(data(get_rank()), start=1):
        accumulator(grad_fn(*map(Tensor, batch))[1])
        if number % 2 == 0:
            rows.append(vector(network.trainable_params()))
            updates.append(int(accumulator.update_count.asnumpy()))
    return {
        "accumulator/weights": np.stack(rows),
        "accumulator/updates": np.array(updates),
        "accumulator/skipped": as_numpy(accumulator.skipped_updates),
        "accumulator/norm": as_numpy(accumulator.judged_norm),
        "accumulator/averages": vector(average.averages),
        "accumulator/swapped": vector(average.averages),
    }


CASES = {"step": train, "disagree": disagree, "from one process": go_on, "accumulator": accumulate}
