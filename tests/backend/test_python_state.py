"""State of Python that an optimizer or a transform writes is found, by the name that its code has for it, and put back.
MindSpore's own optimizers have none."""

from __future__ import annotations

import functools
import itertools
import random

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.experimental import optim as experimental

from gaccum_ms import Transform
from gaccum_ms.backend import python_state
from gaccum_ms.backend.python_state import Root, written_state
from tests.support.reference import PlainSGD, as_numpy

updates = 0


class Holder:
    """State that an optimizer holds."""

    __slots__ = ("slot",)
    made = 0

    def __init__(self):
        self.slot = 0

    def bump(self):
        self.slot = self.slot + 1

    @classmethod
    def count(cls):
        cls.made = cls.made + 1


class Attributes:
    """State in another form."""

    def __init__(self):
        self.inner = {"list": [0]}


class Steps(nn.Cell):
    def __init__(self):
        super().__init__()
        self.seen = []

    def construct(self, x):
        self.seen.append(1)
        return x * len(self.seen)


class Schedule(nn.learning_rate_schedule.LearningRateSchedule):
    def __init__(self):
        super().__init__()
        self.factor = 1.0

    def construct(self, global_step):
        self.factor = self.factor / 2
        return Tensor(self.factor, ms.float32)


class Update(nn.Cell):
    """An optimizer whose `write` is one of the kinds. It updates by a Parameter of its own."""

    def __init__(self, write):
        super().__init__()
        self.weight = Parameter(Tensor([1.0, 2.0]), name="weight")
        self.made = Parameter(Tensor(0.0), name="made")
        self.number, self.list, self.dict, self.set = 0, [Tensor(0.0)], {"a": 1}, {1}
        self.array, self.holder, self.object, self.cell = np.zeros(2), Holder(), Attributes(), Steps()
        self.random, self.generator, self.iterator = random.Random(1), np.random.default_rng(0), itertools.count()
        self.by_function = write

    def construct(self, gradients):
        self.by_function(self, gradients)
        self.made = self.made + 1
        return ops.assign(self.weight, self.weight - gradients[0])


def number(self, gradients):
    self.number += 1


def second_call(self, gradients):
    if self.made > 0:
        self.number += 1


def alias(self, gradients):
    values = self.list
    values[0] = values[0] + 1


def append(self, gradients):
    self.list.append(1)


def of_dict(self, gradients):
    self.dict["b"] = 1


def of_set(self, gradients):
    self.set.add(len(self.set) + 1)


def by_numpy(self, gradients):
    np.add(self.array, 1, out=self.array)


def method(self, gradients):
    self.holder.bump()


def of_class(self, gradients):
    self.holder.count()


def of_object(self, gradients):
    self.object.inner["list"][0] += 1


def cell(self, gradients):
    self.cell(gradients[0])


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
    second_call: "self.number",
    alias: "self.list[0]",
    append: "self.list",
    of_dict: "self.dict",
    of_set: "self.set",
    by_numpy: "self.array",
    method: "self.holder.slot",
    of_class: "Holder.made",
    of_object: "self.object.inner['list'][0]",
    cell: "self.cell.seen",
    iterator: "self.iterator",
    of_globals: "updates",
    closure(): "seen",
}


def constant(self, gradients):
    values, by_name = [], {}
    for gradient in gradients:
        values.append(gradient * self.dict["a"])
        by_name["last"] = gradient
    self.number = 0
    return values


def writes_parameters(self, gradients):
    ops.assign_add(self.made, Tensor(1.0))


def draws(self, gradients):
    return np.random.normal() + random.random() + self.random.random() + self.generator.normal()


def fails(self, gradients):
    raise RuntimeError(f"{self.list[0]} cannot run eagerly")


def everything(update):
    values = (update.number, update.list[:], dict(update.dict), set(update.set), *update.array, updates)
    held = (update.holder.slot, Holder.made, update.object.inner["list"][0], update.cell.seen[:])
    shared = (random.getstate(), str(np.random.get_state()))
    generators = (*shared, update.random.getstate(), update.generator.bit_generator.state)
    tensors = [as_numpy(value).tolist() for value in (update.weight, update.made, ms.get_rng_state())]
    return values, held, generators, tensors, update.training


def state_of(value, *weights):
    def run(size):
        value((ops.ones(2, ms.float32) * size,))

    return written_state([Root("Update", value, run)], weights)


@pytest.mark.parametrize("write", FOUND, ids=lambda write: write.__qualname__)
def test_state_is_found_by_its_name_and_put_back(write):
    update = Update(write)
    before = everything(update)
    assert state_of(update, update.weight) == [f"{FOUND[write]} of 'Update'"]
    assert everything(update) == before


@pytest.mark.parametrize("write", [constant, writes_parameters, draws, fails])
def test_other_code_has_none_and_leaves_nothing(write):
    update = Update(write)
    before = everything(update)
    assert state_of(update, update.weight) == []
    assert everything(update) == before


def test_functions_and_methods_have_state_too(pynative):
    attributes, seen = Attributes(), {"calls": 0}

    def counted(calls, gradients):
        calls["calls"] += 1
        return gradients

    def bump(gradients):
        attributes.inner["list"].append(1)
        return gradients

    class Trainer:
        def __init__(self):
            self.calls = 0

        def change(self, gradients):
            self.calls += 1
            return gradients

    assert state_of(functools.partial(counted, seen)) == ["self['calls'] of 'Update'"]
    assert state_of(bump) == ["attributes.inner['list'] of 'Update'"]
    assert state_of(Trainer().change) == ["self.calls of 'Update'"]
    assert seen == {"calls": 0} and attributes.inner == {"list": [0]}


def test_a_schedule_of_the_users_in_an_optimizer_of_mindspores(mode):
    network = nn.Dense(2, 1)
    optimizer = nn.Momentum(network.trainable_params(), Schedule(), 0.9)
    before = [as_numpy(parameter) for parameter in optimizer.get_parameters()]
    gradients = tuple(map(ops.ones_like, optimizer.parameters))
    root = Root("Momentum", optimizer, lambda size: optimizer(gradients))
    assert written_state([root], optimizer.parameters) == ["self.learning_rate.factor of 'Momentum'"]
    for parameter, value in zip(optimizer.get_parameters(), before, strict=True):
        np.testing.assert_array_equal(as_numpy(parameter), value)


class KeepsInParameters(Transform):
    """As the documentation says, with lists that are constants."""

    def prepare(self, network):
        self.made = self.state("made", np.zeros((), np.int32))
        self.sums = [self.state_like(f"sum.{weight.name}", weight) for weight in self.weights]

    def change(self, gradients):
        changed = []
        for index in range(len(gradients)):
            changed.append(gradients[index] / (self.made + 1))
        return tuple(changed)

    def after_update(self, after):
        for total in self.sums:
            after = ops.depend(after, ops.assign_add(total, ops.ones_like(total)))
        return ops.depend(after, ops.assign_add(self.made, Tensor(1, ms.int32)))


def test_state_in_parameters_is_none():
    network = nn.Dense(2, 1)
    link, optimizer = KeepsInParameters(), PlainSGD(0.1, network.trainable_params())
    link.begin(ms.ParameterTuple(network.trainable_params()), network)

    def run(size):
        gradients = link.change(tuple(ops.full_like(weight, size) for weight in link.weights))
        link.after_update(Tensor(0.0))
        optimizer(gradients)

    assert written_state([Root("link", link, run), Root("optimizer", optimizer, run)], link.weights) == []
    assert int(link.made.asnumpy()) == 0


@pytest.mark.parametrize("kind", [nn.AdamWeightDecay, nn.LAMB, experimental.Adam], ids=lambda kind: kind.__module__)
def test_mindspores_optimizers_give_no_alarm_as_bases_of_the_users(kind, monkeypatch):
    """Run as if they were the user's, with all that MindSpore sets while they run."""
    of_package = python_state._root_of
    monkeypatch.setattr(python_state, "_is_the_users", lambda value: of_package(value) in ("mindspore", "tests"))
    optimizer = kind(nn.Dense(3, 2).trainable_params(), 0.1)
    gradients = tuple(map(ops.ones_like, optimizer.parameters))
    reached = python_state._Reached(optimizer, optimizer.parameters)
    assert reached.changed_by(lambda size: optimizer(gradients)) == []
    monkeypatch.undo()
    assert not python_state._Reached(optimizer, optimizer.parameters).may_write
