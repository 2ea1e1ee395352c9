"""Whole-batch training with the transforms written in NumPy, as a reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from tests.support.history_oracle import Arrays, norm_of
from tests.support.modes import eagerly
from tests.support.reference import as_numpy


class ByHand(nn.Optimizer):
    """An optimizer after rules. Each rule maps gradients and weights to gradients, or to None, which skips the update.

    It runs eagerly. `after` gets the weights after each update.
    """

    def __init__(self, inner: nn.Optimizer, rules: Sequence[Callable], after: Sequence[Callable] = ()) -> None:
        super().__init__(0.1, list(inner.parameters))
        self.inner = inner
        self.rules, self.after = list(rules), list(after)
        self.updates = 0

    def construct(self, gradients):
        changed: Arrays | None = [as_numpy(one).astype(np.float64) for one in gradients]
        for rule in self.rules:
            changed = rule(changed, self.weights())
            if changed is None:
                return gradients
        self.inner(tuple(Tensor(one, ms.float32) for one in changed))
        self.updates += 1
        for act in self.after:
            act(self.weights())
        return gradients

    def weights(self) -> Arrays:
        return [as_numpy(weight) for weight in self.inner.parameters]


@eagerly()
def train_whole(network: nn.Cell, optimizer: ByHand, data: Sequence) -> Arrays:
    """The weights after each batch of MindSpore's own step, as one vector."""
    step = nn.TrainOneStepCell(network, optimizer).set_train()
    rows = []
    for batch in data:
        step(*map(Tensor, batch))
        rows.append(np.concatenate([one.ravel() for one in optimizer.weights()]))
    return rows


def global_norm(max_norm: float) -> Callable:
    return lambda gradients, _: [one * min(1, max_norm / norm_of(gradients)) for one in gradients]


def value(low: float, high: float) -> Callable:
    return lambda gradients, _: [np.clip(one, low, high) for one in gradients]


def adaptive(clipping: float, eps: float = 1e-3, exclude: Sequence[int] = ()) -> Callable:
    """Adaptive gradient clipping row by row, as in the paper."""

    def rule(gradients, weights):
        changed = [one.copy() for one in gradients]
        for index, (gradient, weight) in enumerate(zip(changed, weights, strict=True)):
            if index in exclude:
                continue
            rows = [(gradient, weight)] if gradient.ndim < 2 else list(zip(gradient, weight, strict=True))
            for row, of_weight in rows:
                largest = clipping * max(np.linalg.norm(of_weight), eps)
                if np.linalg.norm(row) > largest:
                    row *= largest / np.linalg.norm(row)
        return changed

    return rule


def spikes(factor: float = np.inf, norm: float = np.inf, history: int = 128, warmup: int = 16) -> Callable:
    norms: list[float] = []

    def rule(gradients, _):
        now = norm_of(gradients)
        usual = np.median(norms[-history:]) if len(norms) >= warmup else np.inf
        if np.isfinite(now):
            norms.append(now)
        return gradients if now <= norm and now <= factor * usual else None

    return rule


class Average:
    """An exponential moving average of weights, which begins with the present weights."""

    def __init__(self, weights: Arrays, decay: float, warmup: bool | float = False) -> None:
        self.values = [one.astype(np.float64) for one in weights]
        self.decay, self.warmup, self.updates = decay, warmup, 0

    def __call__(self, weights: Arrays) -> None:
        self.updates += 1
        decay = self.decay
        if self.warmup is True:
            decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        elif self.warmup:
            decay = self.decay * (1 - np.exp(-self.updates / self.warmup))
        self.values = [decay * old + (1 - decay) * new for old, new in zip(self.values, weights, strict=True)]
