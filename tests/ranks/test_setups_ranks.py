"""Options on two ranks: set-ups as in options/test_setups.py, where each rank has its own batches, of its own lengths
and counts. Each call does what NumPy does with the samples of both ranks, and the ranks' weights are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mindspore.communication import get_rank

from tests.options.test_setups import FOCAL, MASKED, MOMENTUM, SCALED, play
from tests.support.history_oracle import Setup
from tests.support.reference import vector
from tests.support.two_ranks import Results, results_of

pytestmark = pytest.mark.distributed

SUM = {"gradients_mean": False, **MOMENTUM}
SETUPS = {
    "mean": (Setup(micro_size=3, **MOMENTUM), "train train train"),
    "sum": (Setup(body="tanh", loss="sum", micro_batch_size=2, **SUM), "train train train"),
    "bfloat16": (
        Setup(micro_batch_size=5, dtype="bfloat16", transforms=(("value", -10.0, 10.0),)),
        "train train train train",  # a batch of one micro-batch needs no accumulators
    ),
    "counts": (Setup(**MASKED, **MOMENTUM, max_norm=0.2), "train train bad_count bad_count bad_count train"),
    "ratio": (Setup(loss="ratio", micro_size=2, max_norm=0.2), "train train bad_count train"),
    "two-losses": (
        Setup(loss="two masked", counts=("mask", None), micro_size=3, loss_weights=(1.0, 0.5), **SCALED),
        "train poisoned train",
    ),
    "dropped": (Setup(micro_size=2, drops=True), "train poisoned poisoned train"),
    "dropped-graph": (Setup(**MASKED, drops=True, **SCALED, mode="graph"), "train poisoned poisoned train"),
    "windows-sum": (Setup(micro_size=2, steps=2, **SUM), "train train train train"),
    "windows-counts": (
        Setup(**FOCAL, steps=3, min_count=1.0),
        "train train train train train_but_on_one_rank flush train train train flush flush",
    ),
    "split-sum": (Setup(split="uneven", steps=2, **SUM), "train train train train"),
    "split-counts-graph": (
        Setup(loss="masked", counts=("mask",), split="uneven", steps=2, mode="graph"),
        "train train train train",
    ),
    "gradients-overflow": (
        Setup(accumulator=True, steps=2, max_norm=0.2, **SCALED, **MOMENTUM),
        "train train train poisoned train train",
    ),
    "gradients-counts-sum": (
        Setup(accumulator=True, counts=("mask",), steps=3, **SUM),
        "train train bad_count train train train_but_on_one_rank flush train flush",
    ),
}


def case(name: str) -> Callable[[Path], Results]:
    def function(out: Path) -> Results:
        setup, actions = SETUPS[name]
        history = play(setup, actions, ranks=2, rank=get_rank(), **({"lengths": [7]} if setup.mode == "graph" else {}))
        return {f"{name}/weights": vector(history.network.trainable_params())}

    return function


CASES = {name: case(name) for name in SETUPS}
ranks = results_of("test_setups_ranks")


@pytest.mark.parametrize("name", SETUPS)
def test_two_ranks_do_what_numpy_does(ranks, name):
    np.testing.assert_array_equal(*(results[f"{name}/weights"] for results in ranks))
