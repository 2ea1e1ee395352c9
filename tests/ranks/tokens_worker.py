"""The cases of test_tokens_ranks.py on ranks (support/ranks.py): micro-batches by length, different in number on two
ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.communication import get_rank

from gaccum_ms import AutoSize
from tests.splitting.test_auto_tokens import Limited, auto_step, marked
from tests.splitting.test_max_tokens import LENGTH, batch, max_tokens, step_of
from tests.support.modes import MODES
from tests.support.reference import as_numpy, vector
from tests.support.two_ranks import Results

SAMPLES = (6, 24)  # in the batches of even and of odd ranks; later pairs of ranks have more
NUMBER = 4  # batches of each rank
# mode, batches of a window, options
KINDS = {
    "one batch": ("graph", 1, {"max_grad_norm": 0.05}),
    "window": ("pynative", 2, {}),
    "halves": ("graph", 2, {}),  # rank 1 alone runs out of memory, in the second batch
}


def data_of(rank: int) -> list[tuple[np.ndarray, ...]]:
    return [marked(batch(100 * rank + number, SAMPLES[rank % 2] + rank // 2)) for number in range(NUMBER)]


def play(name: str) -> Callable[[Path], Results]:
    def case(_: Path) -> Results:
        rank, (mode, steps, options) = get_rank(), KINDS[name]
        ms.set_context(mode=MODES[mode])
        ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
        halves = name == "halves"
        if halves:
            # A rank that compiles alone, for half the tokens, must not wait for the others to send it their weights.
            ms.set_auto_parallel_context(parameter_broadcast=True)
            network, step = auto_step(96, accumulation_steps=steps)
        else:
            step = step_of(max_tokens(), accumulation_steps=steps, **options)
        split, numbers, tokens = step.split, [], []
        for number, one in enumerate(data_of(rank)):
            if halves and rank == 1 and number == 1:
                network.set_largest(60)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "For 'GradAccumulationCell', memory ran out")
                step(*map(Tensor, one))
            numbers.append(len(split.plan.parts))
            tokens.append(split.plan.max_tokens)
        ms.set_auto_parallel_context(parameter_broadcast=False)
        return {
            f"{name}/weights": vector(step.weights),
            f"{name}/updates": as_numpy(step.update_count),
            f"{name}/loss": as_numpy(step.window_loss),
            f"{name}/micro-batches": np.array(numbers),
            f"{name}/tokens": np.array([*tokens, split.max_tokens]),
        }

    return case


def search(_: Path) -> Results:
    """Batches of rank 1 have a larger width. First, rank 1 has less memory than rank 0; then both have memory for one
    row. No trial may wait for the other rank's weights."""
    rank, widths = get_rank(), ((12, LENGTH - 4), (LENGTH,))
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True, parameter_broadcast=True)
    found, losses = [], []
    for memory in ((70, 30), (30, 30)):
        split = max_tokens(max_tokens=AutoSize(1 << 40), widths=widths[rank])
        step = step_of(split, Limited(tokens=memory[rank]))
        for number in range(2):
            tokens, labels = batch(10 * rank + number, width=widths[rank][-1])
            losses.append(float(step(Tensor(tokens), Tensor(labels)).asnumpy()))
        found.append(step.split.max_tokens)
    ms.set_auto_parallel_context(parameter_broadcast=False)
    return {"search/tokens": np.array(found), "search/losses": np.array(losses)}


CASES = {name: play(name) for name in KINDS} | {"search": search}
