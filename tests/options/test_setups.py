"""What the options mean, each in its main cases and both modes, and each pair that is not refused: set-ups of random
histories that are written down here. After each call, losses, outputs, weights, the optimizer's state and records are
those of support/history_oracle.py, which is NumPy. Batches are random; some samples, or all of a batch, weigh nothing.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from tests.histories import Difference, History
from tests.support.history_oracle import Setup
from tests.support.history_setups import make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:For '(GradAccumulationCell|GradAccumulator|Train)")

MASKED = {"loss": "masked", "counts": ("mask",), "micro_size": 3}
FOCAL = {"loss": "focal", "counts": ("mask",), "micro_size": 3}
SCALED = {"scale": (16.0, 2, 3)}
MOMENTUM = {"optimizer": "momentum", "rates": (0.05, 0.1, 0.02), "decay": 0.01}

EAGER = {
    "masks": (Setup(**MASKED, **MOMENTUM), "train train train bad_count train train"),
    "bare-sum": (Setup(body="tanh", loss="sum", micro_batch_size=2), "train train train"),
    "sum-by-count": (Setup(loss="masked sum", counts=("mask",), micro_size=8), "train train train train"),
    "ratio": (Setup(loss="ratio", micro_size=3, **MOMENTUM), "train train train bad_count train"),
    "sum-over-nothing": (Setup(**FOCAL), "train train train train train"),
    "least-count": (Setup(**FOCAL, min_count=4.0, **MOMENTUM), "train train train train train"),
    "ratio-over-nothing": (Setup(loss="focal ratio", micro_size=3, min_count=1.0), "train train train train"),
    "two-losses": (
        Setup(loss="two masked", counts=("mask", None), micro_size=5, loss_weights=(0.5, 2.0)),
        "train train train train",
    ),
    "two-sums": (Setup(loss="two sums", counts=("mask", "rows"), micro_size=3, min_count=1.0), "train train train"),
    "outputs": (Setup(**MASKED, aux=True, steps=2), "train train train flush"),
    "outputs-dropped": (Setup(**MASKED, aux=True, drops=True, **SCALED), "train poisoned poisoned train"),
    "noise": (Setup(micro_batch_size=2, noise=True, max_norm=0.2), "train train train"),
    "noise-of-counts": (Setup(**MASKED, noise=True, steps=2), "train train train train train flush"),
    "windows": (Setup(body="tanh", micro_size=2, steps=3, **MOMENTUM), "train train train train train flush train"),
    "windows-of-counts": (
        Setup(**MASKED, steps=3, compensated=True, max_norm=0.1, optimizer="adam_weight_decay"),
        "train train train train bad_count train train train flush flush",
    ),
    "windows-over-nothing": (
        Setup(**FOCAL, steps=2, min_count=1.0, **SCALED),
        "train train train poisoned train train flush",
    ),
    "scaled": (Setup(micro_size=2, **SCALED, **MOMENTUM), "train poisoned train set_scale train"),
    "scaled-windows": (
        Setup(micro_size=2, steps=2, **SCALED, **MOMENTUM),
        "train train poisoned train set_scale train train train poisoned train train",
    ),
    "dropped": (Setup(micro_batch_size=2, drops=True, noise=True), "train poisoned poisoned train"),
    "errors": (
        Setup(micro_size=2, steps=3, transforms=(("last",),), **MOMENTUM),
        "train error train error train error train train error error train error train flush",
    ),
    "errors-of-gradients": (
        Setup(accumulator=True, steps=3, transforms=(("last",),)),
        "train train error train error train train error error train train flush",
    ),
    "own-split": (Setup(loss="masked", counts=("mask",), split="uneven", steps=2), "train train train flush"),
    "tokens": (Setup(body="tokens", loss="masked", counts=("labels",), split="tokens", steps=2), "train train train"),
    "gradients": (
        Setup(accumulator=True, counts=("mask",), steps=3, **SCALED),
        "train train train poisoned train flush",
    ),
    "gradients-of-sums": (Setup(accumulator=True, loss="focal", counts=("mask",), steps=2), "train train train flush"),
}
GRAPH = {
    "counts-noise": (Setup(**MASKED, noise=True, max_norm=0.2, **SCALED, **MOMENTUM), "train train poisoned train"),
    "ratio-outputs": (Setup(loss="ratio", micro_batch_size=2, aux=True, min_count=4.0), "train train bad_count train"),
    "two-losses": (EAGER["two-losses"][0], "train train train"),
    "windows": (EAGER["windows-over-nothing"][0], "train train train poisoned flush train flush"),
    "dropped": (EAGER["outputs-dropped"][0], "train poisoned poisoned train"),
}


def play(setup: Setup, actions: str, ranks: int = 1, rank: int = 0, **changed) -> History:
    history = History(7, setup.mode, ranks, rank, setup=setup)
    vars(history).update(changed)
    try:
        with np.errstate(all="ignore"):
            history.play(actions.split())
    except Difference as difference:
        raise AssertionError(history.report(difference)) from None
    return history


@pytest.mark.parametrize("name", EAGER)
def test_each_call_does_what_numpy_does(name):
    play(*EAGER[name])


@pytest.mark.parametrize("name", GRAPH)
def test_a_graph_does_what_numpy_does(name):
    """All batches have one length, so that the step is compiled once."""
    setup, actions = GRAPH[name]
    play(dataclasses.replace(setup, mode="graph"), actions, lengths=[7])


VALUES = {
    "split": {"split": "uneven", "micro_size": None},
    "accumulation_steps": {"steps": 2},
    "ratio": {"loss": "ratio"},
    "min_count": {"loss": "masked", "counts": ("mask",), "min_count": 4.0},
    "loss_weights": {"loss": "two masked", "counts": ("mask", None), "loss_weights": (0.5, 2.0)},
    "max_grad_norm": {"max_norm": 0.3},
    "transforms": {"transforms": (("value", -0.3, 0.2), ("spikes", 1.5, 2.0, 4, 2), ("average", 0.9, True))},
    "accumulators": {"dtype": "bfloat16", "compensated": True},
    "overflow": {"drops": True},
    "record_noise": {"noise": True},
    "aux": {"aux": True},
    "scale_sense": {"scale": (16.0, 2, 3)},
}


@pytest.mark.parametrize("first", VALUES)
def test_each_pair_is_refused_or_does_what_numpy_does(first):
    names = list(VALUES)
    for second in names[names.index(first) + 1 :]:
        setup = Setup(**{"micro_size": 2, **VALUES[first], **VALUES[second]})
        try:
            make_trainer(setup, 0)
        except ValueError as error:
            assert re.match("For '(GradAccumulationCell|TrainOneStepWithGradAccumulationCell)', ", str(error))
        else:
            play(setup, "train poisoned train" if setup.drops or setup.scale else "train train")
