"""Networks whose losses compare the samples of a batch, for the tests of WithBatchLossCell."""

from __future__ import annotations

from collections.abc import Callable

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from gaccum_ms import GradAccumulationCell, TrainOneStepWithGradAccumulationCell, WithBatchLossCell
from tests.support.reference import Run, as_numpy

CLASSES = 4


def unit_length(values):
    return values / ops.sqrt(ops.square(values).sum(axis=-1, keepdims=True) + 1e-6)


class Towers(nn.Cell):
    """Two inputs, two towers, two embeddings, as in CLIP."""

    def __init__(self):
        super().__init__()
        self.image = nn.SequentialCell(nn.Dense(12, 16), nn.Tanh(), nn.Dense(16, 6))
        self.text = nn.Dense(9, 6)

    def construct(self, image, text):
        return unit_length(self.image(image)), unit_length(self.text(text))


class InfoNCE(nn.Cell):
    """Symmetric InfoNCE with a learnt temperature: a Parameter of the loss."""

    def __init__(self):
        super().__init__()
        self.temperature = ms.Parameter(Tensor(3.0, ms.float32), name="temperature")

    def construct(self, image, text):
        logits = image @ text.T * self.temperature
        own = ops.arange(image.shape[0])
        return (ops.cross_entropy(logits, own) + ops.cross_entropy(logits.T, own)) / 2


class Labelled(nn.Cell):
    """One tower, which also returns the labels: the loss needs all of them."""

    def __init__(self):
        super().__init__()
        self.tower = nn.SequentialCell(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Dense(48, 6))

    def construct(self, x, labels):
        return unit_length(self.tower(x.reshape((-1, 1, 3, 4)))), labels


class SupCon(nn.Cell):
    """Khosla et al., 2020 (arXiv:2004.11362): other samples with the same label are a sample's positives."""

    def construct(self, values, labels):
        logits = values @ values.T / 0.5
        others = 1 - ops.eye(values.shape[0], values.shape[0], ms.float32)
        log_probability = logits - ops.log((ops.exp(logits) * others).sum(axis=1, keepdims=True))
        positives = ops.cast(labels.reshape((-1, 1)) == labels.reshape((1, -1)), ms.float32) * others
        number = ops.maximum(ops.reduce_sum(positives, 1), 1.0)
        return -(ops.reduce_sum(positives * log_probability, 1) / number).mean()


class Single(nn.Cell):
    """One tower that returns one Tensor, not a tuple."""

    def __init__(self):
        super().__init__()
        self.tower = nn.Dense(12, 6)

    def construct(self, x):
        return self.tower(x)


class Spread(nn.Cell):
    """A loss for the embeddings' covariance in the batch: neither a sum over samples, nor over pairs."""

    def construct(self, values):
        off = values - values.mean(axis=0, keep_dims=True)
        covariance = off.T @ off / values.shape[0]
        return ops.square(covariance - ops.eye(values.shape[1], values.shape[1], ms.float32)).mean()


KINDS: dict[str, tuple[type[nn.Cell], type[nn.Cell]]] = {
    "towers": (Towers, InfoNCE),
    "labels": (Labelled, SupCon),
    "single": (Single, Spread),
}


def make_parts(kind: str) -> tuple[nn.Cell, nn.Cell]:
    """A backbone and a loss, with weights that depend only on the kind."""
    backbone, loss_fn = (one() for one in KINDS[kind])
    random = np.random.default_rng(7)
    for parameter in backbone.get_parameters():
        parameter.set_data(Tensor(random.normal(size=parameter.shape) * 0.4, ms.float32))
    return backbone, loss_fn


def batches(kind: str, samples: int, number: int = 6) -> list[tuple[np.ndarray, ...]]:
    """Distinct random batches."""
    random = np.random.default_rng(3)
    result = []
    for _ in range(number):
        x = random.normal(size=(samples, 12)).astype(np.float32)
        text = (x[:, :9] + random.normal(size=(samples, 9))).astype(np.float32)
        labels = random.integers(0, CLASSES, size=samples).astype(np.int32)
        result.append({"towers": (x, text), "labels": (x, labels), "single": (x,)}[kind])
    return result


class Whole(nn.Cell):
    """The whole batch's network as a user would write it without this project; MindSpore's own step trains it."""

    def __init__(self, backbone: nn.Cell, loss_fn: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.backbone = backbone
        self.loss_fn = loss_fn

    def construct(self, *inputs):
        found = self.backbone(*inputs)
        if isinstance(found, ms.Tensor):
            return self.loss_fn(found)
        return self.loss_fn(*found)


def whole(backbone, loss_fn, optimizer):
    return nn.TrainOneStepCell(Whole(backbone, loss_fn), optimizer)


def accumulated(scale_sense=None, gather_ranks=False, **options) -> Callable:
    """A ``make_step`` for `train`: our step with these options of the cell."""

    def make_step(backbone, loss_fn, optimizer):
        network = WithBatchLossCell(backbone, loss_fn, gather_ranks=gather_ranks)
        return TrainOneStepWithGradAccumulationCell(GradAccumulationCell(network, **options), optimizer, scale_sense)

    return make_step


def train(make_step: Callable, kind: str, data: list, optimizer: Callable | None = None) -> Run:
    """Train on `data` with the step that ``make_step(backbone, loss_fn, optimizer)`` returns."""
    backbone, loss_fn = make_parts(kind)
    parameters = [*backbone.trainable_params(), *loss_fn.trainable_params()]
    update = optimizer(parameters) if optimizer else nn.SGD(parameters, 0.2)
    step = make_step(backbone, loss_fn, update).set_train()
    losses = []
    for batch in data:
        loss = step(*map(Tensor, batch))
        losses.append(float((loss[0] if isinstance(loss, tuple) else loss).asnumpy()))
    return Run(np.array(losses), {one.name: as_numpy(one) for one in [*parameters, *update.get_parameters()]})
