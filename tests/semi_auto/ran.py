"""A finished graph, run by the simulation (machine.py), and the same update in NumPy."""

from __future__ import annotations

from collections import Counter

import numpy as np

from tests.semi_auto.cases import SAMPLES
from tests.semi_auto.machine import Machine

RANKS = 8
WEIGHTS = ("first", "bias", "second")
rng = np.random.default_rng(0)
X, Y = (rng.normal(size=(RANKS * SAMPLES, width)).astype(np.float32) for width in (12, 1))


def part(number, axis=0):
    """Equal parts along an axis; neighbours have different parts."""
    return lambda whole, rank: np.split(whole, number, axis)[rank % number]


def lies(**layout):
    """The parts of the weights and of the optimizer's state."""
    return layout | {f"{state}.{name}": one for state in ("accum", "stat") for name, one in layout.items()}


# (4, 2) devices, with the columns of one layer and the rows of the next.
SPLIT = lies(first=part(2, axis=1), bias=part(2), second=part(2))


def shards(parts: int, *arrays):
    """Each rank's part of each input, if the samples are in `parts` parts on the ranks. One row is no sample's."""
    return [
        [array if len(array) == 1 else np.split(array, parts)[rank * parts // RANKS] for rank in range(RANKS)]
        for array in arrays
    ]


class Ran:
    """A case's graph, after one or several runs on the machine."""

    def __init__(self, case, parts=RANKS, batch=(X, Y), layout=None, changed=None, steps=1):
        self.machine = Machine(case.program, RANKS, {**case.parameters, **(changed or {})}, layout, parts)
        self.before = {name: [one.copy() for one in held] for name, held in self.machine.state.items()}
        self.results = []
        for _ in range(steps):
            self.results = self.machine.step(*shards(parts, *batch))
        self.counts = Counter(executed.node.op for executed in self.machine.executed)

    @classmethod
    def windows(cls, case, parts, layout, batches, scale=1.0, adding=None, steps=2):
        """Windows of so many batches: one graph adds, the other adds and updates. `adding` : another graph that adds.
        ``flush`` in the place of a batch: the one before again, of which nothing is added."""
        first = cls(adding or case.adding, parts, layout=layout, steps=0)
        last = cls(case, parts, layout=layout, steps=0)
        for name, values in last.machine.state.items():
            shared = first.machine.state.setdefault(name, values)
            assert [one.shape for one in shared] == [one.shape for one in values], f"{name} lies otherwise"
        last.machine.state = first.machine.state
        for index, batch in enumerate(batches):
            flushes = isinstance(batch, str)
            ran = last if flushes or (index + 1) % steps == 0 else first
            batch = batches[index - 1] if flushes else batch
            last.machine.state["gaccum_ms.window_unit"][:] = [np.float32(scale)] * RANKS
            last.machine.state["gaccum_ms.batch_weight"][:] = [np.float32(not flushes)] * RANKS
            ran.results = ran.machine.step(*shards(parts, *batch))
        first.counts = Counter(executed.node.op for executed in first.machine.executed)
        last.adding = first
        return last

    def parameter(self, name):
        return self.machine.state[name]

    @property
    def losses(self):
        return [result[0] if isinstance(result, tuple) else result for result in self.results]

    def adds(self):
        """The number of additions to each accumulator."""
        return Counter(
            executed.node.arguments[0].split("_", 1)[1]
            for executed in self.machine.executed
            if executed.node.op == "AssignAdd" and "accu_grads." in executed.node.arguments[0]
        )

    def gradient_collectives(self):
        """The reductions of gradients, which the compiler adds where weights are used, and calls "mirrors"."""
        return [
            executed
            for executed in self.machine.executed
            if executed.node.op in ("AllReduce", "ReduceScatter")
            and ("mirror" in executed.node.attributes.lower() or "parallel_optimizer" in executed.node.attributes)
        ]


def same_update(ours: Ran, theirs: Ran, tolerance=1e-5) -> bool:
    """Whether both have the same weights on every rank, and report the same loss."""
    left, right = ([*(one for name in WEIGHTS for one in ran.parameter(name)), *ran.losses] for ran in (ours, theirs))
    return all(np.allclose(one, other, rtol=tolerance, atol=tolerance) for one, other in zip(left, right, strict=True))


def by_hand(values, x=X, y=Y):
    """Loss and gradient of the mean over all samples of all ranks, in NumPy."""
    hidden = np.maximum(x @ values["first"] + values["bias"], 0)
    error = hidden @ values["second"] - y
    backward = 2 * error / error.size
    at_hidden = backward @ values["second"].T * (hidden > 0)
    gradients = {"first": x.T @ at_hidden, "bias": at_hidden.sum(0), "second": hidden.T @ backward}
    return np.mean(error**2), gradients
