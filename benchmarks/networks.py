"""The networks of the comparison, with the shape of a sample and the size of a batch.

Each is written once for MindSpore (mindspore_networks.py) and once for PyTorch (torch_networks.py), with the same
layers. These files are imported when a network is built, so that a worker loads only one framework, and the controller
none.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np

CLASSES = 10
VOCABULARY = 1000
TOKENS = 64  # in a sequence


@dataclass(frozen=True)
class Network:
    """The description of a network for a worker; `build` is the name of its function in both files.

    A sample has inputs of `sample_shape` , or is a sequence of that many tokens with a label for each. `package` is the
    network's package, if it is not this one; there is then no version for PyTorch.
    """

    build: str
    title: str
    batch: int
    sample_shape: tuple[int, ...]
    tokens: bool = False
    package: str = ""

    def mindspore(self) -> Any:
        return getattr(importlib.import_module("benchmarks.mindspore_networks"), self.build)()

    def mindspore_loss(self) -> Any:
        return importlib.import_module("benchmarks.mindspore_networks").loss(self.tokens)

    def torch(self) -> Any:
        return getattr(importlib.import_module("benchmarks.torch_networks"), self.build)()

    def torch_loss(self) -> Any:
        return importlib.import_module("benchmarks.torch_networks").loss(self.tokens)

    def data(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels of one batch, the same in each call."""
        rng = np.random.default_rng(0)
        if self.tokens:
            tokens = rng.integers(0, VOCABULARY, (batch, TOKENS + 1), dtype=np.int32)
            return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])
        inputs = rng.standard_normal((batch, *self.sample_shape), dtype=np.float32)
        return inputs, rng.integers(0, CLASSES, batch, dtype=np.int32)


COMPARED = ("mlp", "cnn", "resnet18", "transformer")
NETWORKS: dict[str, Network] = {
    "mlp": Network("mlp", "784-512-512-10", 256, (784,)),
    "cnn": Network("cnn", "8 convolutions with GroupNorm, 32x32x3", 256, (3, 32, 32)),
    "resnet18": Network("resnet18", "ResNet-18 with BatchNorm, 128x128x3", 64, (3, 128, 128)),
    "transformer": Network(
        "transformer",
        f"4 layers, width 256, 8 heads, sequences of {TOKENS} tokens, vocabulary {VOCABULARY}",
        64,
        (TOKENS,),
        tokens=True,
    ),
    # For the memory that accumulation adds: its weights are much larger than everything else.
    "wide": Network("wide", "4096-4096-4096-4096-4096-10", 64, (4096,)),
    # For the effect of CPU instructions on depthwise convolutions.
    "mobilenet_v2": Network("mobilenet_v2", "mindcv's MobileNetV2, 128x128x3", 64, (3, 128, 128), package="mindcv"),
}
