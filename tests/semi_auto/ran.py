"""Finished graphs, those of all stages, run by the simulation (machine.py)."""

from __future__ import annotations

from collections import Counter

import numpy as np

from tests.semi_auto.cases import SAMPLES
from tests.semi_auto.compiled import RANKS
from tests.semi_auto.machine import Machine, step_together

WEIGHTS = ("layers.0.weight", "layers.0.bias", "layers.1.weight")  # of one stage


def batch(seed=7, parts=RANKS, width=1):
    """Inputs and labels of so many devices. The number of labels above zero differs from device to device."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(parts * SAMPLES, 12)).astype(np.float32)
    above = np.repeat(np.linspace(0.05, 0.95, parts), SAMPLES)[:, None]
    sign = np.where(rng.random((len(x), width)) < above, 1, -1)
    return x, (np.abs(rng.normal(size=(len(x), width))) * sign).astype(np.float32)


def part(number, axis=0):
    """Equal parts along an axis; neighbours have different parts."""
    return lambda whole, rank: np.split(whole, number, axis)[rank % number]


# The columns of one layer and the rows of the next.
SPLIT = {f"layers.{index}.weight": part(2, axis=1 - index % 2) for index in range(4)}
SPLIT |= {f"layers.{index}.bias": part(2) for index in (0, 2)}
# By layouts, the parts of weights that are no equal rows.
PLACES = {
    "split": SPLIT,
    "named axes": SPLIT,
    "ws": dict.fromkeys(WEIGHTS, part(4)),
    "no data parallel": dict.fromkeys(WEIGHTS, part(RANKS)) | {WEIGHTS[0]: part(RANKS, axis=1)},
}


class Ran:
    """A case's graphs of all stages, after so many steps on inputs and labels, `data` , by default a batch."""

    def __init__(self, case, layout="dp", data=None, stages=1, steps=1):
        self.devices = RANKS // stages
        parts_of_samples = {"split": 4 // stages, "named axes": 4, "full batch": 1, "no data parallel": 1}
        self.parts = parts_of_samples.get(layout, self.devices)
        of_stages = [case.stage(number) for number in range(stages)]
        self.values = {name: value for one in of_stages for name, value in one.parameters.items()}
        self.stages = [
            Machine(number, one.program, self.devices, self.values, PLACES.get(layout, {}), self.parts)
            for number, one in enumerate(of_stages)
        ]
        has_all = stages == 1 or layout == "full batch"
        self.data = batch(parts=self.devices if has_all else self.parts) if data is None else data
        for _ in range(steps):
            self.step(self.data)

    def step(self, data):
        """Run all graphs once. One row is no sample's: all devices have it."""
        places = [rank * self.parts // self.devices for rank in range(self.devices)]
        parts = [[one] * self.parts if len(one) == 1 else np.split(one, self.parts) for one in data]
        shards = [[of_input[place] for place in places] for of_input in parts]
        self.results = [result for of_stage in step_together(self.stages, shards) for result in of_stage]

    @classmethod
    def windows(cls, case, layout, batches, scale=1.0, steps=2):
        """Windows of so many batches: one graph adds, the other adds and updates. ``flush`` in the place of a batch:
        the one before again, of which nothing is added."""
        adding, last = (cls(one, layout, steps=0) for one in (case.adding, case))
        state = adding.stages[0].state
        for name, values in last.stages[0].state.items():
            shared = state.setdefault(name, values)
            assert [one.shape for one in shared] == [one.shape for one in values], f"{name} lies otherwise"
        last.stages[0].state = state
        for index, data in enumerate(batches):
            flushes = isinstance(data, str)
            ran = last if flushes or (index + 1) % steps == 0 else adding
            state["gaccum_ms.window_unit"][:] = [np.float32(scale)] * RANKS
            state["gaccum_ms.batch_weight"][:] = [np.float32(not flushes)] * RANKS
            ran.step(batches[index - 1] if flushes else data)
        last.adding = adding
        return last

    def parameter(self, name):
        """The values on all devices that have it."""
        return [value for stage in self.stages for value in stage.state.get(name, ())]

    @property
    def losses(self):
        return [float(result[0] if isinstance(result, tuple) else result) for result in self.results]

    @property
    def counts(self):
        """The nodes that have run, of the first stage, by kind."""
        return Counter(node.op for node in self.stages[0].executed)

    def gradient_collectives(self):
        """The reductions of gradients, which the compiler adds where weights are used, and calls "mirrors"."""
        return [
            node
            for node in self.stages[0].executed
            if node.op in ("AllReduce", "ReduceScatter")
            and ("mirror" in node.attributes.lower() or "parallel_optimizer" in node.attributes)
        ]

    def distance(self, update, prefix=""):
        """The largest difference of a weight, or of the Parameter with this prefix, from the update's on any device, as
        a part of that weight's movement. Of a weight of two stages, the first has it."""
        largest = 0.0
        for name, whole in update.after.items():
            movement = np.abs(whole - update.before[name]).max()
            assert movement > 0, name
            stage = next(stage for stage in self.stages if prefix + name in stage.state)
            for rank, value in enumerate(stage.state[prefix + name]):
                expected = stage.places[prefix + name](whole, rank)
                assert value.shape == expected.shape, name
                largest = max(largest, np.abs(value - expected).max() / movement)
        return largest

    def moved(self, names):
        """Of each of these weights on each device: whether it is another than before."""
        return [
            not np.array_equal(value, stage.places[name](self.values[name], rank))
            for stage in self.stages
            for name in names
            for rank, value in enumerate(stage.state.get(name, ()))
        ]
