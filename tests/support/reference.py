"""The reference of the tests: small networks, distinct random batches, and MindSpore's step on the whole batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from gaccum_ms import GradAccumulationCell, TrainOneStepWithGradAccumulationCell
from tests.support.modes import eagerly

CLASSES = 5
FEATURES = 12


class Outer(nn.Cell):
    """A network or a step within another Cell."""

    def __init__(self, inner):
        super().__init__(auto_prefix=False)
        self.inner = inner

    def construct(self, x, y):
        return self.inner(x, y)


class Classifier(nn.Cell):
    """Base of the test networks: inputs are cast to the weights' dtype, logits to float32."""

    dtype = ms.float32

    def construct(self, x):
        return self.logits(x).astype(ms.float32)


class DenseNet(Classifier):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Dense(FEATURES, 16)
        self.out = nn.Dense(16, CLASSES)

    def logits(self, x):
        return self.out(ops.tanh(self.hidden(x.astype(self.dtype))))


class ConvNet(Classifier):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.Identity()
        self.out = nn.Dense(6 * FEATURES, CLASSES)

    def logits(self, x):
        image = x.astype(self.dtype).reshape((-1, 1, 3, 4))
        return self.out(ops.relu(self.norm(self.conv(image))).reshape((-1, 6 * FEATURES)))


class BatchNormInEvalNet(ConvNet):
    """BatchNorm that normalises by its moving statistics, and so couples no samples."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(6, use_batch_statistics=False)


class EmbeddingNet(Classifier):
    """Reads each feature's sign and first digit as a token: most rows are used by some micro-batches only."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 8)
        self.out = nn.Dense(8, CLASSES)

    def logits(self, x):
        tokens = ops.clamp(x * 5 + 20, 0, 39).astype(ms.int32)
        return self.out(self.embedding(tokens).mean(axis=1))


class UnusedParameterNet(DenseNet):
    def __init__(self):
        super().__init__()
        self.unused = ms.Parameter(Tensor(np.ones((3, 2)), ms.float32), name="unused")


class CastWeightsNet(Classifier):
    """Low-precision weights with float32 arithmetic: MindSpore's CPU back end multiplies no bfloat16 matrices."""

    def __init__(self):
        super().__init__()
        self.hidden = ms.Parameter(Tensor(np.zeros((FEATURES, 16)), ms.float32), name="hidden")
        self.out = ms.Parameter(Tensor(np.zeros((16, CLASSES)), ms.float32), name="out")

    def logits(self, x):
        return ops.tanh(x @ self.hidden.astype(ms.float32)) @ self.out.astype(ms.float32)


NETWORKS: dict[str, type[Classifier]] = {
    "dense": DenseNet,
    "conv": ConvNet,
    "batchnorm_eval": BatchNormInEvalNet,
    "embedding": EmbeddingNet,
    "unused": UnusedParameterNet,
    "cast_weights": CastWeightsNet,
}


def make_network(kind: str, dtype: ms.Type = ms.float32) -> Classifier:
    """A network with weights that depend only on its kind."""
    network = NETWORKS[kind]()
    random = np.random.default_rng(7)
    for parameter in network.get_parameters():
        value = random.normal(size=parameter.shape) * 0.4
        if parameter.name.endswith("moving_variance"):
            value = value**2 + 0.5
        parameter.set_dtype(dtype)
        parameter.set_data(Tensor(value, dtype))
    network.dtype = dtype
    return network


def batches(samples: int, number: int = 10, seed: int = 3) -> list[tuple[np.ndarray, np.ndarray]]:
    """Distinct random batches. The label depends on the sample, so that gradients of micro-batches differ strongly."""
    random = np.random.default_rng(seed)
    result = []
    for _ in range(number):
        x = random.normal(size=(samples, FEATURES)).astype(np.float32)
        y = (np.abs(x).sum(axis=1) * 3).astype(np.int32) % CLASSES
        result.append((x, y))
    return result


def _decayed(parameters):
    return [
        {"params": [p for p in parameters if p.name.endswith("weight")], "weight_decay": 0.05, "lr": 0.03},
        {"params": [p for p in parameters if not p.name.endswith("weight")]},
        {"order_params": list(parameters)},
    ]


class Line(nn.Cell):
    """Loss of y ~ w x: mean over the samples of (w x - y)^2 / 2."""

    def __init__(self, weight):
        super().__init__()
        self.weight = ms.Parameter(Tensor(weight, ms.float32), name="weight")

    def construct(self, x, y):
        return ops.square(self.weight * x - y).mean() / 2


class Regression(nn.Cell):
    """A small network with its loss: squared errors, their mean, or, with a mask, the mean weighted by it.

    Compiled or eager, it takes half the time of a classifier with cross entropy.
    """

    def __init__(self):
        super().__init__()
        random = np.random.default_rng(7)
        self.hidden = ms.Parameter(Tensor(random.normal(size=(FEATURES, 8)) * 0.4, ms.float32), name="hidden")
        self.out = ms.Parameter(Tensor(random.normal(size=8) * 0.4, ms.float32), name="out")

    def construct(self, x, y, *mask):
        errors = ops.square((ops.tanh(x @ self.hidden) * self.out).sum(-1) - y) / 4
        if len(mask) > 0:
            return (errors * mask[0]).sum() / mask[0].sum()
        return errors.mean()


class PlainSGD(nn.Optimizer):
    """SGD for weights of any dtype: MindSpore has no bfloat16 optimizer, nor Assign, on CPU."""

    @ms.jit  # as in MindSpore's optimizers: otherwise PyNative's tape may forbid writing into a weight
    def construct(self, gradients):
        updated = ()
        for index in range(len(self.parameters)):
            parameter = self.parameters[index]
            value = parameter.astype(ms.float32) - self.get_lr() * gradients[index].astype(ms.float32)
            updated = (*updated, parameter.copy_(value.astype(parameter.dtype)))
        return updated


OPTIMIZERS: dict[str, Callable] = {
    "sgd": lambda parameters: nn.SGD(parameters, 0.05),
    "plain_sgd": lambda parameters: PlainSGD(0.05, parameters),
    "momentum": lambda parameters: nn.Momentum(parameters, 0.05, 0.9, weight_decay=0.01),
    "adam": lambda parameters: nn.Adam(parameters, 0.01, weight_decay=0.01),
    "adam_weight_decay": lambda parameters: nn.AdamWeightDecay(parameters, 0.01, weight_decay=0.05),
    "dynamic_lr": lambda parameters: nn.SGD(parameters, nn.CosineDecayLR(0.001, 0.1, 8)),
    "grouped": lambda parameters: nn.Momentum(_decayed(parameters), 0.02, 0.9),
}


class Clipped(nn.Cell):
    """Clips in place of a reducer, which has nothing to do on one rank."""

    def __init__(self, max_norm: float) -> None:
        super().__init__(auto_prefix=False)
        self.max_norm = max_norm

    def construct(self, gradients):
        return ops.clip_by_global_norm(gradients, self.max_norm)


class Run(NamedTuple):
    """The results of a training run: losses, parameters and the optimizer's state, by name."""

    losses: np.ndarray
    state: dict[str, np.ndarray]


def as_numpy(parameter: ms.Parameter) -> np.ndarray:
    """A float32 copy; asnumpy() may be a view, which training would change."""
    return np.array(parameter.astype(ms.float32).asnumpy())


def vector(parameters) -> np.ndarray:
    """All values of some Parameters, one after the other."""
    return np.concatenate([as_numpy(one).ravel() for one in parameters])


def train(make_step: Callable, network: nn.Cell, optimizer: nn.Optimizer, data: Sequence) -> Run:
    """Train on `data` with the step that ``make_step(loss_cell, optimizer)`` returns."""
    loss_cell = network if isinstance(network, Regression) else nn.WithLossCell(network, nn.CrossEntropyLoss())
    step = make_step(loss_cell, optimizer).set_train()
    losses = [float(step(*map(Tensor, batch)).asnumpy()) for batch in data]
    named = {p.name: p for p in [*network.get_parameters(), *optimizer.get_parameters()]}
    return Run(np.array(losses), {name: as_numpy(parameter) for name, parameter in named.items()})


def make_step(
    network: nn.Cell, optimizer: Callable = lambda weights: nn.SGD(weights, 0.1), scale_sense: Any = None, **options
) -> TrainOneStepWithGradAccumulationCell:
    """Our step of a network that returns its loss, with these options of the cell; ``optimizer(weights)`` makes the
    optimizer."""
    cell = GradAccumulationCell(network, **options)
    return TrainOneStepWithGradAccumulationCell(cell, optimizer(cell.trainable_params()), scale_sense).set_train()


def accumulated(**options) -> Callable:
    """A ``make_step`` for `train`: our step with these options of the cell."""

    def make_step(loss_cell, optimizer):
        return TrainOneStepWithGradAccumulationCell(GradAccumulationCell(loss_cell, **options), optimizer)

    return make_step


@functools.cache
@eagerly()
def whole_batch(kind: str, optimizer: str, samples: int, dtype: ms.Type = ms.float32, updates: int = 4) -> Run:
    """The reference: MindSpore's own step on the whole batch."""
    network = make_network(kind, dtype)
    data = batches(samples, updates)
    return train(nn.TrainOneStepCell, network, OPTIMIZERS[optimizer](network.trainable_params()), data)


def relative_error(value: np.ndarray, reference: np.ndarray) -> float:
    """Largest difference, relative to the largest entry of the reference."""
    return float(np.abs(value - reference).max() / max(np.abs(reference).max(), 1e-30))


def assert_equivalent(run: Run, reference: Run, tolerance: float) -> None:
    """The equivalence contract: same losses, parameters and optimizer state to rounding."""
    assert relative_error(run.losses, reference.losses) < tolerance, (run.losses, reference.losses)
    assert run.state.keys() == reference.state.keys()
    errors = {name: relative_error(run.state[name], reference.state[name]) for name in reference.state}
    assert max(errors.values()) < tolerance, errors


def fails_once(error: BaseException) -> Callable[[Any], Any]:
    """A function of the gradients, for `transforms` , that raises this error in the first update."""
    failures = [error]

    def transform(gradients):
        if failures:
            raise failures.pop()
        return gradients

    return transform
