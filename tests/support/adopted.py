"""Shared by the tests of adapters: three batches must train like the one batch that joins them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mindspore import Tensor, nn, ops

from tests.support.reference import FEATURES, Regression, as_numpy

K = 3  # batches that share an update
ROUNDING = 1e-6  # absolute error of weights below 1

Batches = Sequence[tuple[np.ndarray, np.ndarray]]


def few_batches(number: int = 2 * K, samples: int = 4, seed: int = 3) -> list[tuple[np.ndarray, np.ndarray]]:
    """Distinct random batches."""
    random = np.random.default_rng(seed)
    return [
        (
            random.normal(size=(samples, FEATURES)).astype(np.float32),
            (random.normal(size=samples) * 3).astype(np.float32),
        )
        for _ in range(number)
    ]


def joined(batches: Batches, number: int = K) -> list[tuple[np.ndarray, ...]]:
    """Joins each `number` of batches into one; the last has the rest."""
    parts = [batches[start : start + number] for start in range(0, len(batches), number)]
    return [tuple(np.concatenate(values) for values in zip(*part, strict=True)) for part in parts]


class Predictor(Regression):
    """The network without its loss, for mindyolo."""

    def construct(self, x):
        return (ops.tanh(x @ self.hidden) * self.out).sum(-1)


class MeanLoss(nn.Cell):
    """A mean over the batch's samples, like the losses of YOLOv4 and YOLOX."""

    def construct(self, predicted, labels, images):
        loss = ops.square(predicted - labels).mean() / 4
        return loss, ops.stop_gradient(ops.stack((loss, loss * 2)))


class BatchTimesLoss(MeanLoss):
    """The mean times the batch's size, like mindyolo's other losses."""

    def construct(self, predicted, labels, images):
        loss, items = super().construct(predicted, labels, images)
        return loss * images.shape[0], items


class Trained(NamedTuple):
    """The results of a training."""

    weights: dict[str, np.ndarray]
    outputs: list[Any]
    step: Any
    optimizer: nn.Optimizer


def trained(
    make_step: Callable, batches: Batches, make_optimizer: Callable = lambda weights: nn.Momentum(weights, 0.1, 0.9)
) -> Trained:
    """Train a small network with the step that ``make_step(network, optimizer)`` returns."""
    network = Regression()
    weights = {one.name: one for one in network.get_parameters()}  # mindcv's step gives them other names
    optimizer = make_optimizer(network.trainable_params())
    step = make_step(network, optimizer)
    step.set_train()
    outputs = [step(*map(Tensor, batch)) for batch in batches]
    return Trained({name: as_numpy(one) for name, one in weights.items()}, outputs, step, optimizer)


def steps(make_step: Callable, *given: Any) -> Callable:
    """Makes for `trained` a step of a network, an optimizer, `given` and the number of batches that share an update."""

    def of(number: int = K, **arguments: Any) -> Callable:
        return lambda network, optimizer: make_step(
            network, optimizer, *given, gradient_accumulation_steps=number, **arguments
        )

    return of


def with_average(make: Callable, average: Callable) -> Callable:
    """These `steps` , with the average of a package."""

    def of(number: int = K, **arguments: Any) -> Callable:
        return lambda network, optimizer: make(number, ema=average(network), **arguments)(network, optimizer)

    return of


def averages(step: nn.Cell) -> dict[str, np.ndarray]:
    """The average's Parameters."""
    return {one.name: as_numpy(one) for one in step.get_parameters() if one.name.startswith("ema.")}


def apart(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """The largest difference between weights."""
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def assert_takes_arguments_of(ours: Callable, theirs: Callable) -> None:
    """Check that names, order and defaults are the same; more arguments may follow."""
    given = [one for one in inspect.signature(theirs).parameters.values() if one.name not in ("self", "kwargs")]
    taken = list(inspect.signature(ours).parameters.values())[: len(given)]
    assert [one.name for one in taken] == [one.name for one in given]
    for own, one in zip(taken, given, strict=True):
        if one.default is not inspect.Parameter.empty and one.default != {}:
            assert own.default == one.default, one.name


def losses(outputs: Sequence[Any]) -> list[float]:
    """The losses in the steps' outputs, alone or in tuples."""
    return [float((one[0] if isinstance(one, tuple) else one).asnumpy()) for one in outputs]
