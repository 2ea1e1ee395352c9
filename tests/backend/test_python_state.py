"""State of Python that an optimizer or a transform writes is found, by the name that its code has for it, and put back.
MindSpore's own optimizers have none."""

from __future__ import annotations

import itertools
import random

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from gaccum_ms.backend.python_state import Root, written_state
from tests.support.reference import as_numpy
from tests.support.state import assert_identical
from tests.support.state import everything as parameters_of

updates = 0


class Holder:
    """State that an optimizer holds."""

    def __init__(self):
        self.bumps = 0

    def bump(self):
        self.bumps = self.bumps + 1


class Update(nn.Cell):
    """An optimizer whose `write` is one of the kinds. It updates by a Parameter of its own."""

    def __init__(self, write):
        super().__init__()
        self.weight = Parameter(Tensor([1.0, 2.0]), name="weight")
        self.made = Parameter(Tensor(0.0), name="made")
        self.number, self.list, self.dict = 0, [Tensor(0.0)], {"a": 1}
        self.holder, self.iterator, self.generator = Holder(), itertools.count(), np.random.default_rng(0)
        self.by_function = write

    def construct(self, gradients):
        self.by_function(self, gradients)
        self.made = self.made + 1
        return ops.assign(self.weight, self.weight - gradients[0])


def number(self, gradients):
    self.number += 1


def alias(self, gradients):
    values = self.list
    values[0] = values[0] + 1


def method(self, gradients):
    self.holder.bump()


def iterator(self, gradients):
    return next(self.iterator)


def of_globals(self, gradients):
    global updates
    updates += 1


def closure():
    seen = 0

    def write(self, gradients):
        nonlocal seen
        seen += 1

    return write


FOUND = {
    number: "self.number",
    alias: "self.list[0]",
    method: "self.holder.bumps",
    iterator: "self.iterator",
    of_globals: "updates",
    closure(): "seen",
}


def constant(self, gradients):
    values = []
    values.append(gradients[0] * self.dict["a"])
    self.number = 0
    return values


def draws(self, gradients):
    return np.random.normal() + random.random() + self.generator.normal()


def fails(self, gradients):
    raise RuntimeError(f"{self.list[0]} cannot run eagerly")


def everything(update):
    values = (update.number, update.list[:], dict(update.dict), update.holder.bumps, updates)
    generators = random.getstate(), str(np.random.get_state()), update.generator.bit_generator.state
    tensors = [as_numpy(value).tolist() for value in (update.weight, update.made, ms.get_rng_state())]
    return values, generators, tensors, update.training


def state_of(update):
    root = Root("Update", update, lambda size: update((ops.ones(2) * size,)))
    return written_state([root], [update.weight])


@pytest.mark.parametrize("write", [*FOUND, constant, draws, fails], ids=lambda write: write.__qualname__)
def test_state_is_found_by_its_name_and_put_back(write):
    """Other code has none, and leaves nothing."""
    update = Update(write)
    before = everything(update)
    assert state_of(update) == ([f"{FOUND[write]} of 'Update'"] if write in FOUND else [])
    assert everything(update) == before


def test_code_that_writes_into_a_list_alone_is_run():
    """Code that may write nothing is not run."""
    counted = [0]

    def count(size):
        values = counted
        values[0] = values[0] + 1

    assert written_state([Root("count", count, count)], []) == ["counted[0] of 'count'"]
    assert counted == [0]


class Schedule(nn.learning_rate_schedule.LearningRateSchedule):
    def __init__(self):
        super().__init__()
        self.factor = 1.0

    def construct(self, global_step):
        self.factor = self.factor / 2
        return Tensor(self.factor, ms.float32)


class OfMindSpores(nn.AdamWeightDecay):
    def construct(self, gradients):
        return super().construct(gradients)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda weights: nn.Momentum(weights, Schedule(), 0.9), ["self.learning_rate.factor of 'optimizer'"]),
        (OfMindSpores, []),
    ],
    ids=["a schedule of the user's", "a base of MindSpore's"],
)
def test_optimizers_of_mindspores(make, found):
    optimizer = make(nn.Dense(2, 1).trainable_params())
    before = parameters_of(optimizer)
    gradients = tuple(map(ops.ones_like, optimizer.parameters))
    root = Root("optimizer", optimizer, lambda size: optimizer(gradients))
    assert written_state([root], optimizer.parameters) == found
    assert_identical(parameters_of(optimizer), before)
