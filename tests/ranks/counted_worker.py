"""The cases of test_counted_ranks.py on ranks (support/ranks.py): counts, several losses and overflows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
from mindspore import Tensor
from mindspore.communication import get_rank
from mindspore.dataset import GeneratorDataset

from gaccum_ms import CountMask, WindowMonitor
from tests.ranks.cases import NotedAllReduce, error_of, named, set_up
from tests.support import window_oracle as oracle
from tests.support.reference import as_numpy, make_step
from tests.support.state import everything
from tests.support.two_ranks import Results

WINDOWS = 5
FIELDS = ("update", "updated", "loss", "count", "loss_terms", "dropped_micro_batches", "grad_norm", "loss_scale")


class Ratio(oracle.Weight):
    """`oracle.Masked` as a sum and its count."""

    def construct(self, x, y, mask):
        return ((self.weight * x - y) ** 2 * mask).sum() / 2, mask.sum()


COUNT = {"micro_size": 2, "count": CountMask()}
DROP = {"overflow": "drop_micro_batch"}
TWO = {"count": oracle.COUNT_BOTH, "loss_weights": (1.0, 0.5)}
LOST = [(1, 0), (6, 1), (7, 0), (7, 3)]  # in the fourth window, all of rank 1 and half of rank 0
KINDS = {
    "count": oracle.case(oracle.Masked, max_grad_norm=1.0, **COUNT),
    "two losses": oracle.case(oracle.MaskedAndMean, poisoned=[(7, 2)], micro_size=3, scale=1024.0, **TWO),
    "dropped, graph": oracle.case(oracle.Masked, "graph", LOST, scale=1024.0, **DROP, **COUNT),
    "dropped samples": oracle.case(oracle.Mean, poisoned=[(3, 1)], micro_size=2, **DROP),
}
KINDS["ratio"] = dataclasses.replace(
    KINDS["count"], network=Ratio, options={"reduction": "ratio", "micro_size": 2, "max_grad_norm": 1.0}
)


def data(name: str) -> list[oracle.Batch]:
    """The batches of both ranks in turn: each window has one of each. The masks of rank 1 are heavy, but count nothing
    in the second window. In the third, nothing counts on either rank."""
    kind = KINDS[name]
    found = kind.batches([6, 6] * WINDOWS if kind.mode == "graph" else [5, 7] * WINDOWS)
    for number, (_, y, mask) in enumerate(found):
        y -= 1  # the gradients are large
        mask *= 1 + 8 * (number % 2)
        if number in (3, 4, 5):
            mask[:] = 0
    return found


def train(name: str) -> Callable[[Path], Results]:
    def case(out: Path) -> Results:
        set_up("graph" if KINDS[name].mode == "graph" else "pynative")
        monitor, model = WindowMonitor(), KINDS[name].make_model()
        batches = GeneratorDataset(data(name)[get_rank() :: 2], ["x", "y", "mask"], shuffle=False)
        model.train(1, batches, callbacks=[monitor])
        found = {field: np.array([getattr(one, field) for one in monitor.records], float) for field in FIELDS}
        return named(name, found | {"weight": as_numpy(model.train_network.weights[0])})  # None is NaN

    return case


def bad_counts(out: Path) -> Results:
    """The errors of counts that are wrong on one rank, and whether they changed something; and a sound window after
    them."""
    set_up()
    step, values = make_step(oracle.Masked(), **COUNT), Tensor(np.ones(4, np.float32))
    before, errors, same = everything(step.optimizer), [], []
    for rank, bad in ((1, -9.0), (0, np.nan), (1, np.inf)):
        mask = np.array([1, 1, 1, bad if rank == get_rank() else 1], np.float32)
        errors.append(error_of(lambda: step(values, 0 * values, Tensor(mask))))  # noqa: B023
        same.append(all((value == before[name]).all() for name, value in everything(step.optimizer).items()))
    step(values, 0 * values, values)
    return named("bad counts", {"errors": errors, "same": same, "weight": as_numpy(step.weights[0])})


def reductions(out: Path) -> Results:
    """The size of each buffer that is sent to the other rank."""
    set_up(gradients_mean=False)
    results = {}
    kinds = {"samples": oracle.case(oracle.Mean, micro_size=2), **KINDS}
    for name in ("samples", "count", "two losses"):
        step = kinds[name].make_model().train_network
        ledger = step.window.ledger
        used = [ledger.grad_reducer] if name == "samples" else [ledger.sum_over_ranks.reducer, step.grad_reducer]
        noted = [NotedAllReduce(one) for one in used]
        for batch in data("count")[get_rank() : 4 : 2]:
            step(*map(Tensor, batch))
        results[name] = [size for one in noted for size in one.sizes]
    return named("reductions", results)


CASES: dict[str, Callable[[Path], Results]] = {
    **{name: train(name) for name in KINDS},
    "bad counts": bad_counts,
    "reductions": reductions,
}
