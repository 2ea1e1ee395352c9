"""The names of a step's Parameters are those after MindSpore's own step, also where two share one, and resume goes by
them."""

from __future__ import annotations

import copy

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import GradAccumulator, resume
from tests.support.reference import make_step
from tests.support.state import assert_identical, everything

X, Y = np.ones((4, 3), np.float32), np.ones((4, 3), np.float32)


class Distilled(nn.Cell):
    """A student learns from a copy of it."""

    def __init__(self, student):
        super().__init__(auto_prefix=False)
        self.student, self.teacher = student, copy.deepcopy(student)
        for weight in self.teacher.get_parameters():
            weight.requires_grad = False
            weight.set_data(weight * 2 + 1)

    def construct(self, x):
        return self.student(x) - ops.stop_gradient(self.teacher(x))


class ScaledLoss(nn.Cell):
    """A loss with a Parameter that has the name of a Dense's."""

    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor(np.full(3, 2.0, np.float32)), name="weight", requires_grad=False)

    def construct(self, outputs, labels):
        return (self.weight * ops.square(outputs - labels)).mean()


class HoldsAnother(nn.Momentum):
    """An optimizer with a Parameter that has the name of a weight."""

    def __init__(self, weights, *arguments):
        super().__init__(weights, *arguments)
        self.another = ms.Parameter(Tensor(np.full(3, 5.0, np.float32)), name="weight", requires_grad=False)


NESTINGS = {
    "teacher": lambda: (Distilled(nn.Dense(3, 3)), nn.MSELoss(), nn.Momentum),
    "loss": lambda: (nn.Dense(3, 3), ScaledLoss(), nn.Momentum),
    "optimizer and teacher": lambda: (Distilled(nn.Dense(3, 3)), nn.MSELoss(), HoldsAnother),
}


def parts(nesting: str):
    network, loss, optimizer = NESTINGS[nesting]()
    return nn.WithLossCell(network, loss), optimizer(network.trainable_params(), 0.1, 0.9)


def make(nesting: str, **options):
    network, optimizer = parts(nesting)
    return make_step(network, lambda weights: optimizer, **options), network, optimizer


def names(*cells: nn.Cell) -> list[str]:
    return [parameter.name for cell in cells for parameter in cell.get_parameters()]


SPLIT = {"split": lambda x, y: [(x[:1], y[:1]), (x[1:], y[1:])]}


@pytest.mark.parametrize(
    ("nesting", "options"),
    [("teacher", {"micro_size": 2}), ("loss", {"accumulation_steps": 3}), ("optimizer and teacher", SPLIT)],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_names_are_those_after_mindspores_own_step_and_a_new_step_resumes(nesting, options, tmp_path, pynative):
    network, optimizer = parts(nesting)
    nn.TrainOneStepCell(network, optimizer).set_train()(Tensor(X), Tensor(Y))
    expected = names(network, optimizer)
    step, network, optimizer = make(nesting, **options)
    before = set(names(step)) - set(names(network, optimizer))  # ours
    for _ in range(2):
        step(Tensor(X), Tensor(Y))
    assert names(network, optimizer) == expected
    assert before <= set(names(step))
    assert len(set(names(step))) == len(names(step))
    file = tmp_path / "step.ckpt"
    ms.save_checkpoint(step, str(file))
    other, *_ = make(nesting, **options)
    resume(other, file)
    assert_identical(everything(other), everything(step))
    for each in (step, other):
        each(Tensor(X), Tensor(Y))
    assert_identical(everything(other), everything(step))


def test_of_an_accumulator_they_are_those_after_the_optimizers_own_call(tmp_path, pynative):
    def make_accumulator():
        network, optimizer = parts("optimizer and teacher")
        return GradAccumulator(optimizer, 2), network, optimizer

    network, optimizer = parts("optimizer and teacher")
    optimizer(tuple(ops.ones_like(weight) for weight in optimizer.parameters))
    expected = names(network, optimizer)
    accumulator, network, optimizer = make_accumulator()
    accumulator(tuple(ops.ones_like(weight) for weight in optimizer.parameters))
    assert names(network, optimizer) == expected
    ms.save_checkpoint(accumulator, str(tmp_path / "loop.ckpt"))
    other, *_ = make_accumulator()
    resume(other, tmp_path / "loop.ckpt")
    assert_identical(everything(other), everything(accumulator))
