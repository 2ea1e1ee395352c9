"""The networks that are measured, with their data and the size of a batch.

Each is written for MindSpore (mindspore_networks.py), and the four that are compared, with the same layers, for PyTorch
too (torch_networks.py). These files are imported when a network is built, so that a worker loads only one framework,
and the controller none.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

CLASSES = 10
VOCABULARY = 1000
TOKENS = 64  # in a sequence
WORDS, WORDS_IN_A_SENTENCE = 30_000, 32

Data = Callable[[int], tuple[np.ndarray, np.ndarray]]  # inputs and labels of a batch, the same in each call


def classified(*shape: int) -> Data:
    """Samples of this shape, each with its class."""

    def data(batch: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        inputs = rng.standard_normal((batch, *shape), dtype=np.float32)
        return inputs, rng.integers(0, CLASSES, batch, dtype=np.int32)

    return data


def copied(*shape: int) -> Data:
    """Samples of this shape, which are their own labels."""

    def data(batch: int) -> tuple[np.ndarray, np.ndarray]:
        samples = np.random.default_rng(0).standard_normal((batch, *shape), dtype=np.float32)
        return samples, samples

    return data


def sequences(batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences of tokens, each with the token after it."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (batch, TOKENS + 1), dtype=np.int32)
    return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])


def sentences(batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Sentences with their first word."""
    words = np.random.default_rng(0).integers(0, WORDS, (batch, WORDS_IN_A_SENTENCE), dtype=np.int32)
    return words, np.ascontiguousarray(words[:, 0])


@dataclass(frozen=True)
class Network:
    """The description of a network for a worker; `build` is the name of its function, `loss` a key of `LOSSES` in both
    files."""

    build: str
    title: str
    batch: int
    data: Data
    loss: str = "classes"

    def mindspore(self) -> Any:
        return getattr(importlib.import_module("benchmarks.mindspore_networks"), self.build)()

    def mindspore_loss(self) -> Any:
        return importlib.import_module("benchmarks.mindspore_networks").LOSSES[self.loss]()

    def torch(self) -> Any:
        return getattr(importlib.import_module("benchmarks.torch_networks"), self.build)()

    def torch_loss(self) -> Any:
        return importlib.import_module("benchmarks.torch_networks").LOSSES[self.loss]()


COMPARED = ("mlp", "cnn", "resnet18", "transformer")
NETWORKS: dict[str, Network] = {
    "mlp": Network("mlp", "784-512-512-10", 256, classified(784)),
    "cnn": Network("cnn", "8 convolutions with GroupNorm, 32x32x3", 256, classified(3, 32, 32)),
    "resnet18": Network("resnet18", "ResNet-18 with BatchNorm, 128x128x3", 64, classified(3, 128, 128)),
    "transformer": Network(
        "transformer",
        f"4 layers, width 256, 8 heads, sequences of {TOKENS} tokens, vocabulary {VOCABULARY}",
        64,
        sequences,
        loss="tokens",
    ),
    # For the memory that accumulation adds: its weights are much larger than everything else.
    "wide": Network("wide", "4096-4096-4096-4096-4096-10", 64, classified(4096)),
    # For searches, because their memory is harder to predict.
    "unet": Network("unet", "U-Net of four levels, 64x64x3", 32, copied(3, 64, 64), loss="squares"),
    "embedding": Network("embedding", f"2 layers, vocabulary {WORDS}", 64, sentences),
    "dense": Network("dense", "eight of 2048", 512, copied(2048), loss="squares"),
}
