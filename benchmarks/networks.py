"""The networks compared on: each written once for MindSpore and once for PyTorch, layer by layer the same.

Frameworks are imported inside the builders, so that a worker loads one of them only, and the controller none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

CLASSES = 10


@dataclass(frozen=True)
class Network:
    """What a worker needs to know of a network: the shape of one sample, how each framework builds it, and variables
    that all of MindSpore's workers run under, unless the user has set them."""

    title: str
    sample_shape: tuple[int, ...]
    mindspore: Callable[[], Any]
    torch: Callable[[], Any]
    mindspore_environment: dict[str, str] = field(default_factory=dict)


_MLP_WIDTHS = (784, 512, 512, CLASSES)


def _mlp_mindspore() -> Any:
    from mindspore import nn

    layers: list[nn.Cell] = []
    for inputs, outputs in pairwise(_MLP_WIDTHS):
        layers += [nn.Dense(inputs, outputs), nn.ReLU()]
    return nn.SequentialCell(layers[:-1])


def _mlp_torch() -> Any:
    from torch import nn

    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(_MLP_WIDTHS):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


# Four stages of two convolutions; each stage ends in a max-pool, so 32x32 becomes 2x2. GroupNorm and not BatchNorm:
# only so do the whole batch and its micro-batches compute the same thing.
_CNN_STAGES = (32, 64, 128, 256)
_CNN_GROUPS = 8


def _cnn_mindspore() -> Any:
    from mindspore import nn

    layers: list[nn.Cell] = []
    channels = 3
    for width in _CNN_STAGES:
        for _ in range(2):
            layers.append(nn.Conv2d(channels, width, 3, pad_mode="pad", padding=1, has_bias=False))
            layers += [nn.GroupNorm(_CNN_GROUPS, width), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2, 2))
    return nn.SequentialCell([*layers, nn.Flatten(), nn.Dense(channels * 2 * 2, CLASSES)])


def _cnn_torch() -> Any:
    from torch import nn

    layers: list[nn.Module] = []
    channels = 3
    for width in _CNN_STAGES:
        for _ in range(2):
            layers.append(nn.Conv2d(channels, width, 3, padding=1, bias=False))
            layers += [nn.GroupNorm(_CNN_GROUPS, width), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2, 2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * 2 * 2, CLASSES))


# The oneDNN in MindSpore 2.10 computes convolutions of its default layout by the reference kernel where the processor
# has AVX-512 (ONEDNN_VERBOSE=1 shows "jit_uni_ncsp:conv+ref:any"), some fifty times slower than by matrix
# multiplication, which it chooses below AVX-512. There one update takes minutes, and any overhead disappears in it.
_NO_REFERENCE_CONVOLUTION = {"ONEDNN_MAX_CPU_ISA": "AVX2"}

NETWORKS: dict[str, Network] = {
    "mlp": Network("784-512-512-10", (784,), _mlp_mindspore, _mlp_torch),
    "cnn": Network(
        "8 convolutions with GroupNorm, 32x32x3", (3, 32, 32), _cnn_mindspore, _cnn_torch, _NO_REFERENCE_CONVOLUTION
    ),
}
