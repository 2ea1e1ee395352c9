"""The networks for MindSpore, and training cells that are written by hand; graph mode reads their source from this
file. torch_networks.py has the compared networks, in the same order, for PyTorch."""

from __future__ import annotations

from itertools import pairwise

import mindspore as ms
import numpy as np
from mindspore import boost, nn, ops

from benchmarks.networks import CLASSES, TOKENS, VOCABULARY, WORDS


class TokenLoss(nn.Cell):
    """Cross entropy over all tokens of all sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss()

    def construct(self, logits, labels):
        return self.loss(logits.reshape((-1, VOCABULARY)), labels.reshape((-1,)))


LOSSES = {"classes": nn.CrossEntropyLoss, "tokens": TokenLoss, "squares": nn.MSELoss}


def _dense(*widths: int) -> nn.Cell:
    layers: list[nn.Cell] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Dense(inputs, outputs), nn.ReLU()]
    return nn.SequentialCell(layers[:-1])


def mlp() -> nn.Cell:
    return _dense(784, 512, 512, CLASSES)


def wide() -> nn.Cell:
    return _dense(*[4096] * 5, CLASSES)


def dense() -> nn.Cell:
    return nn.SequentialCell([nn.Dense(2048, 2048) for _ in range(8)])


# -- convolutions ------------------------------------------------------------------------------------------------------


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Cell:
    return nn.Conv2d(inputs, outputs, size, stride, pad_mode="pad", padding=size // 2, has_bias=False)


def cnn() -> nn.Cell:
    """Four stages of two convolutions; each stage ends in a max-pool, so 32x32 becomes 2x2. It has GroupNorm, because
    with BatchNorm the whole batch and its micro-batches would compute different results."""
    layers: list[nn.Cell] = []
    channels = 3
    for width in (32, 64, 128, 256):
        for _ in range(2):
            layers += [_convolution(channels, width, 3), nn.GroupNorm(8, width), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2, 2))
    return nn.SequentialCell([*layers, nn.Flatten(), nn.Dense(channels * 2 * 2, CLASSES)])


class BasicBlock(nn.Cell):
    """Two convolutions, and a skip connection, which has a convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.SequentialCell(
            _convolution(inputs, outputs, 3, stride),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            _convolution(outputs, outputs, 3),
            nn.BatchNorm2d(outputs),
        )
        shortcut = [_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs)] if inputs != outputs else []
        self.shortcut = nn.SequentialCell(shortcut) if shortcut else nn.Identity()
        self.relu = nn.ReLU()

    def construct(self, x):
        return self.relu(self.layers(x) + self.shortcut(x))


class PaddedMaxPool(nn.Cell):
    """PyTorch's ``MaxPool2d(3, 2, padding=1)`` after ReLU, whose least value is 0, the padding. `nn.MaxPool2d` with
    padding uses a three-dimensional pooling with indices, which is many times slower."""

    def __init__(self) -> None:
        super().__init__()
        self.pad = ops.Pad(((0, 0), (0, 0), (1, 1), (1, 1)))
        self.pool = nn.MaxPool2d(3, 2)

    def construct(self, x):
        return self.pool(self.pad(x))


class GlobalMean(nn.Cell):
    def construct(self, x):
        return x.mean((2, 3))


def resnet18() -> nn.Cell:
    """The published ResNet-18, with 10 classes."""
    layers: list[nn.Cell] = [_convolution(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), PaddedMaxPool()]
    channels = 64
    for width in (64, 128, 256, 512):
        layers += [BasicBlock(channels, width, 1 if width == channels else 2), BasicBlock(width, width, 1)]
        channels = width
    return nn.SequentialCell([*layers, GlobalMean(), nn.Dense(channels, CLASSES)])


# -- transformer -------------------------------------------------------------------------------------------------------

LAYERS, WIDTH, HEADS, WIDE = 4, 256, 8, 1024
EPSILON = 1e-5


class Block(nn.Cell):
    """Causal self-attention and a feed-forward network, each with normalisation before and a skip connection. With
    ReLU, as published: MindSpore's GELU kernel computes one number at a time, and would take a third of the update."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((WIDTH,), epsilon=EPSILON)
        self.qkv = nn.Dense(WIDTH, 3 * WIDTH)
        self.out = nn.Dense(WIDTH, WIDTH)
        self.norm_forward = nn.LayerNorm((WIDTH,), epsilon=EPSILON)
        self.wide = nn.Dense(WIDTH, WIDE)
        self.relu = nn.ReLU()
        self.narrow = nn.Dense(WIDE, WIDTH)
        self.future = ms.Tensor(np.triu(np.full((TOKENS, TOKENS), -1e9, np.float32), 1))

    def heads(self, x):
        return x.reshape((-1, TOKENS, HEADS, WIDTH // HEADS)).transpose((0, 2, 1, 3))

    def construct(self, x):
        query, key, value = ops.split(self.qkv(self.norm(x)), WIDTH, -1)
        scores = ops.matmul(self.heads(query), self.heads(key).swapaxes(2, 3)) * (WIDTH // HEADS) ** -0.5
        mixed = ops.matmul(ops.softmax(scores + self.future, -1), self.heads(value))
        x = x + self.out(mixed.transpose((0, 2, 1, 3)).reshape((-1, TOKENS, WIDTH)))
        return x + self.narrow(self.relu(self.wide(self.norm_forward(x))))


class Transformer(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.SequentialCell([Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm((WIDTH,), epsilon=EPSILON)
        self.out = nn.Dense(WIDTH, VOCABULARY)
        self.places = ms.Tensor(np.arange(TOKENS, dtype=np.int32))

    def construct(self, tokens):
        return self.out(self.norm(self.blocks(self.embedding(tokens) + self.position(self.places))))


def transformer() -> nn.Cell:
    return Transformer()


class Embedding(nn.Cell):
    """A transformer of two layers with 30,000 embeddings: they and the output layer are most of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 512, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.out = nn.Dense(WIDTH, WORDS)

    def construct(self, tokens):
        return self.out(self.layers(self.embedding(tokens)).mean(1))


def embedding() -> nn.Cell:
    return Embedding()


# -- U-Net -------------------------------------------------------------------------------------------------------------


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


def unet() -> nn.Cell:
    return UNet()


# -- training cells ----------------------------------------------------------------------------------------------------


class BoostStep(nn.TrainOneStepCell):
    """The step around `boost.GradientAccumulation` in MindSpore's tutorial. It updates every `micro_size` calls."""

    def __init__(self, network: nn.Cell, optimizer: nn.Optimizer, micro_size: int) -> None:
        super().__init__(network, optimizer)
        self.gradient_accumulation = boost.GradientAccumulation(micro_size, optimizer)

    def construct(self, *inputs):
        loss = self.network(*inputs)
        seed = ops.fill(loss.dtype, loss.shape, self.sens)
        grads = self.grad_reducer(self.grad(self.network, self.weights)(*inputs, seed))
        return self.gradient_accumulation(loss, grads)
