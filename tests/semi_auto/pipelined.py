"""A pipeline's graphs, run by the simulation (pipeline_machine.py), and the whole batch's update in float64."""

from __future__ import annotations

import numpy as np

from tests.semi_auto import whole_batch
from tests.semi_auto.compiled import RANKS
from tests.semi_auto.machine import rows
from tests.semi_auto.pipeline_machine import Pipeline, Stage
from tests.semi_auto.ran import lies, part
from tests.semi_auto.whole_batch import UpdateBySGD

# The samples are in so many parts on a stage's devices.
PARTS = {"split": lambda stages: 4 // stages, "full batch": lambda _: 1}
SPLIT = {f"layers.{index}.weight": part(2, axis=1 - index % 2) for index in range(4)}
SPLIT |= {f"layers.{index}.bias": part(2) for index in (0, 2)}
PLACES = {"split": lies(**SPLIT)}


def parts_of(layout, stages):
    return PARTS[layout](stages) if layout in PARTS else RANKS // stages


def batch(parts, width=1):
    return whole_batch.batch(parts=parts, width=width)


class RanPipeline:
    """A case's graphs of all stages, after one or several runs."""

    def __init__(self, cases, name, stages, layout="dp", data=None, steps=1, blocks=False):
        case = cases(name, stages)
        of_stages = [case.stage(stage) for stage in range(stages)]
        self.parts, self.places = parts_of(layout, stages), PLACES.get(layout, {})
        self.values = {name: value for one in of_stages for name, value in one.parameters.items()}
        devices = RANKS // stages
        self.pipeline = Pipeline(
            [
                Stage(number, one.program, devices, self.values, self.places, self.parts)
                for number, one in enumerate(of_stages)
            ],
            blocks,
        )
        x_and_y = batch(self.parts) if data is None else data
        self.shards = [
            [np.split(one, self.parts)[rank * self.parts // devices] for rank in range(devices)] for one in x_and_y
        ]
        for _ in range(steps):
            self.results = self.pipeline.step(*self.shards)

    def parameter(self, name):
        """The values on all devices that have it."""
        return [value for stage in self.pipeline.stages if name in stage.state for value in stage.state[name]]

    @property
    def losses(self):
        results = [result for of_stage in self.results for result in of_stage]
        return [result[0] if isinstance(result, tuple) else result for result in results]

    def distance(self, update, prefix=""):
        """The largest difference of a weight, or of the Parameter with this prefix, from the update's on any device, as
        a part of that weight's movement. Of a weight of two stages, the first has it."""
        largest = 0.0
        for name, whole in update.after.items():
            movement = np.abs(whole - self.values[name]).max()
            values = next(stage.state[prefix + name] for stage in self.pipeline.stages if prefix + name in stage.state)
            assert movement > 0, name
            for rank, weight in enumerate(values):
                expected = self.part_of(name, whole, rank, weight.shape)
                largest = max(largest, np.abs(weight - expected).max() / movement)
        return largest

    def part_of(self, name, whole, rank, shape):
        """What a device of a stage has of a weight, in this shape."""
        return (self.places.get(name) or rows(shape))(whole, rank)

    def has_moved(self, names):
        """Whether one of these weights is another than before, on any device."""
        return not all(
            np.array_equal(weight, self.part_of(name, self.values[name], rank, weight.shape))
            for name in names
            for rank, weight in enumerate(self.parameter(name))
        )


class WholeUpdate(UpdateBySGD):
    """An update by SGD of pipeline_cases.py's `Staged` , or with a table of `Tied` : `loss` , `total` , the gradient's
    `norm` , and `after` , the weights.

    Args:
        values (dict): The weights before.
        data (tuple): Inputs and labels.
        masked (bool): Whether only labels above zero count.
        clip (float or None): The largest norm.
        min_count (float): The least total.
    """

    def __init__(self, values, data, masked=False, clip=None, min_count=0.0):
        values = {name: value.astype(np.float64) for name, value in values.items()}
        x, y = (one.astype(np.float64) for one in data)
        layers = [name.removesuffix(".weight") for name in values if name.endswith(".weight") and name.count(".") == 2]
        products = [(values[f"{layer}.weight"], values[f"{layer}.bias"]) for layer in layers]
        is_tied = "enter.table" in values
        if is_tied:
            table = values["enter.table"]
            products = [(table, 0.0), *products, (table.T, 0.0)]
        has_relu = [False, True, True, False] if is_tied else [True, True, True, False]
        reached, inputs = [], [x]
        for (weight, bias), relu in zip(products, has_relu, strict=True):
            reached.append(inputs[-1] @ weight + bias)
            inputs.append(np.maximum(reached[-1], 0) if relu else reached[-1])
        error, mask = inputs[-1] - y, (y > 0) if masked else np.ones_like(y)
        self.total = mask.sum()
        divisor = max(self.total, min_count, 1e-30)
        self.loss = (mask * error**2).sum() / divisor
        backward, gradients = 2 * mask * error / divisor, []
        for index in reversed(range(4)):
            backward = backward * (reached[index] > 0) if has_relu[index] else backward
            gradients.insert(0, (inputs[index].T @ backward, backward.sum(0)))
            backward = backward @ products[index][0].T
        by_name = {}
        if is_tied:
            by_name["enter.table"] = gradients[0][0] + gradients[-1][0].T
            gradients = gradients[1:-1]
        for layer, (weight, bias) in zip(layers, gradients, strict=True):
            by_name |= {f"{layer}.weight": weight, f"{layer}.bias": bias}
        super().__init__(values, by_name, clip)
