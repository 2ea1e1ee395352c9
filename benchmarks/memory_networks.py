"""The six networks whose memory is measured: three of the benchmark, and three that are harder to predict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from benchmarks.networks import NETWORKS


class Down(nn.Cell):
    """Two convolutions."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.SequentialCell(
            nn.Conv2d(inputs, outputs, 3),
            nn.GroupNorm(8, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3),
            nn.ReLU(),
        )

    def construct(self, x):
        return self.layers(x)


class Up(nn.Cell):
    """A transposed convolution, and two convolutions of its output joined with the skip connection."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.grow = nn.Conv2dTranspose(inputs, outputs, 2, 2, pad_mode="valid")
        self.layers = Down(2 * outputs, outputs)

    def construct(self, x, skip):
        return self.layers(ops.concat((self.grow(x), skip), 1))


class UNet(nn.Cell):
    """Four levels of 64, 32, 16 and 8 pixels; predicts its input's three channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = Down(3, 16), Down(16, 32), Down(32, 64), Down(64, 128)
        self.pool = nn.MaxPool2d(2, 2)
        self.up_third, self.up_second, self.up_first = Up(128, 64), Up(64, 32), Up(32, 16)
        self.out = nn.Conv2d(16, 3, 1)

    def construct(self, x):
        first = self.first(x)
        second = self.second(self.pool(first))
        third = self.third(self.pool(second))
        last = self.last(self.pool(third))
        return self.out(self.up_first(self.up_second(self.up_third(last, third), second), first))


class Embedding(nn.Cell):
    """A transformer of two layers with 30,000 embeddings: they and the output layer are most of its weights."""

    words, width, tokens = 30_000, 256, 32

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.words, self.width)
        layer = nn.TransformerEncoderLayer(self.width, 4, 512, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.out = nn.Dense(self.width, self.words)

    def construct(self, tokens):
        return self.out(self.layers(self.embedding(tokens)).mean(1))


def _momentum(parameters: list[ms.Parameter]) -> nn.Optimizer:
    return nn.Momentum(parameters, 0.01, 0.9)


def _adam(parameters: list[ms.Parameter]) -> nn.Optimizer:
    return nn.Adam(parameters, 1e-3)


@dataclass(frozen=True)
class Case:
    """A network with its loss, an optimizer and the data of a batch."""

    network: Callable[[], nn.Cell]
    loss: Callable[[], nn.Cell]
    data: Callable[[int], tuple[np.ndarray, np.ndarray]]
    optimizer: Callable[[list[ms.Parameter]], nn.Optimizer]
    batch: int

    def make(self) -> tuple[nn.Cell, nn.Optimizer]:
        """The network with its loss, and the optimizer."""
        ms.set_seed(1)
        network = self.network()
        return nn.WithLossCell(network, self.loss()), self.optimizer(list(network.trainable_params()))


def _compared(name: str, batch: int) -> Case:
    network = NETWORKS[name]
    return Case(network.mindspore, network.mindspore_loss, network.data, _momentum, batch)


def _pictures(samples: int) -> tuple[np.ndarray, np.ndarray]:
    pictures = np.random.default_rng(0).standard_normal((samples, 3, 64, 64), dtype=np.float32)
    return pictures, pictures


def _sentences(samples: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, Embedding.words, (samples, Embedding.tokens), dtype=np.int32)
    return tokens, np.ascontiguousarray(tokens[:, 0])


def _rows(samples: int) -> tuple[np.ndarray, np.ndarray]:
    rows = np.random.default_rng(0).standard_normal((samples, 2048), dtype=np.float32)
    return rows, rows


def _eight_dense() -> nn.Cell:
    return nn.SequentialCell([nn.Dense(2048, 2048) for _ in range(8)])


CASES = {
    "unet": Case(UNet, nn.MSELoss, _pictures, _adam, 32),
    "mlp": _compared("mlp", 4096),
    "cnn": _compared("cnn", 256),
    "transformer": _compared("transformer", 64),
    "embedding": Case(Embedding, nn.CrossEntropyLoss, _sentences, _adam, 256),
    "dense": Case(_eight_dense, nn.MSELoss, _rows, _adam, 1024),
}
