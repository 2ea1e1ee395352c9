"""The cases of test_split_ranks.py on ranks (support/ranks.py): a function as ``split=`` , with different numbers of
micro-batches on two ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import get_rank

from gaccum_ms import CountMask, TrainOneStepWithGradAccumulationCell, resume
from tests.support.modes import MODES
from tests.support.reference import Regression, as_numpy, batches, make_step, vector
from tests.support.state import manager
from tests.support.two_ranks import Results

SIZES = (6, 10)  # samples in each rank's batches
NUMBER = 4  # batches of each rank
# mode, gradients_mean, options
SPLITS = {
    "samples, sum over ranks": ("pynative", False, {"accumulation_steps": 2}),
    "count": ("graph", True, {"accumulation_steps": 2, "count": CountMask()}),
    "overflow": ("pynative", True, {}),
}


def halves(*batch):
    return [tuple(one[:3] for one in batch), tuple(one[3:] for one in batch)]


def many(*batch):
    """A micro-batch of one sample, then micro-batches of three."""
    starts = (0, 1, 4, 7, 10)
    return [tuple(one[start:end] for one in batch) for start, end in itertools.pairwise(starts)]


def data_of(name: str, rank: int) -> list[tuple[np.ndarray, ...]]:
    """A rank's batches. Masks of rank 0 are light, and some of its micro-batches count nothing."""
    random, result = np.random.default_rng(7 + rank), []
    for number, (x, y) in enumerate(batches(SIZES[rank], NUMBER, seed=20 + rank)):
        mask = random.uniform(0.01, 0.1, len(x)) if rank == 0 else random.uniform(1, 9, len(x))
        mask[: 3 * (rank == 0 and number % 2 == 0)] = 0
        if name == "overflow" and rank == 1 and number == 1:
            x[4, 0] = np.inf
        result.append((x, y, mask.astype(np.float32)) if name == "count" else (x, y))
    return result


def step_of(name: str, rank: int) -> TrainOneStepWithGradAccumulationCell:
    scale = manager() if name == "overflow" else None
    momentum = lambda weights: nn.Momentum(weights, 0.05, 0.9)  # noqa: E731
    return make_step(Regression(), momentum, scale, split=(halves, many)[rank], **SPLITS[name][2])


def play(name: str) -> Callable[[Path], Results]:
    def case(out: Path) -> Results:
        rank, (mode, mean, _) = get_rank(), SPLITS[name]
        ms.set_context(mode=MODES[mode])
        ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=mean)
        step, earlier = step_of(name, rank), []
        for number, batch in enumerate(data_of(name, rank)):
            if name == "count" and number == 3:  # in mid-window
                file = out / f"split{rank}.ckpt"
                ms.save_checkpoint(step, str(file))
                earlier.append(step)  # a Cell that is deleted takes other Cells' graphs for such inputs with it
                step = step_of(name, rank)
                resume(step, file)
            step(*map(Tensor, batch))
        return {
            f"{name}/weights": vector(step.weights),
            f"{name}/updates": as_numpy(step.update_count),
            f"{name}/count": as_numpy(step.window_count),
            f"{name}/loss": as_numpy(step.window_loss),
            f"{name}/graphs": np.array(len(step._runner._graph.compile_cache)),
        }

    return case


CASES = {name: play(name) for name in SPLITS}
