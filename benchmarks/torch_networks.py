"""The networks for PyTorch; mindspore_networks.py has the same networks, in the same order, for MindSpore."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from benchmarks.networks import CLASSES, TOKENS, VOCABULARY


class TokenLoss(nn.Module):
    """Cross entropy over all tokens of all sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss()

    def forward(self, logits, labels):
        return self.loss(logits.reshape((-1, VOCABULARY)), labels.reshape((-1,)))


LOSSES = {"classes": nn.CrossEntropyLoss, "tokens": TokenLoss}


def _dense(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def mlp() -> nn.Module:
    return _dense(784, 512, 512, CLASSES)


# -- convolutions ------------------------------------------------------------------------------------------------------


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Module:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


def cnn() -> nn.Module:
    """Four stages of two convolutions; each stage ends in a max-pool, so 32x32 becomes 2x2. It has GroupNorm, because
    with BatchNorm the whole batch and its micro-batches would compute different results."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 128, 256):
        for _ in range(2):
            layers += [_convolution(channels, width, 3), nn.GroupNorm(8, width), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2, 2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * 2 * 2, CLASSES))


class BasicBlock(nn.Module):
    """Two convolutions, and a skip connection, which has a convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _convolution(inputs, outputs, 3, stride),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            _convolution(outputs, outputs, 3),
            nn.BatchNorm2d(outputs),
        )
        shortcut = [_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs)] if inputs != outputs else []
        self.shortcut = nn.Sequential(*shortcut)
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.relu(self.layers(x) + self.shortcut(x))


class GlobalMean(nn.Module):
    def forward(self, x):
        return x.mean((2, 3))


def resnet18() -> nn.Module:
    """The published ResNet-18, with 10 classes."""
    layers: list[nn.Module] = [_convolution(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    channels = 64
    for width in (64, 128, 256, 512):
        layers += [BasicBlock(channels, width, 1 if width == channels else 2), BasicBlock(width, width, 1)]
        channels = width
    return nn.Sequential(*layers, GlobalMean(), nn.Linear(channels, CLASSES))


# -- transformer -------------------------------------------------------------------------------------------------------

LAYERS, WIDTH, HEADS, WIDE = 4, 256, 8, 1024
EPSILON = 1e-5


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each with normalisation before and a skip connection."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((WIDTH,), eps=EPSILON)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm_forward = nn.LayerNorm((WIDTH,), eps=EPSILON)
        self.wide = nn.Linear(WIDTH, WIDE)
        self.relu = nn.ReLU()
        self.narrow = nn.Linear(WIDE, WIDTH)
        self.register_buffer("future", torch.triu(torch.full((tokens, tokens), -1e9), 1))

    def heads(self, x):
        return x.reshape((*x.shape[:2], HEADS, WIDTH // HEADS)).permute((0, 2, 1, 3))

    def forward(self, x):
        tokens = x.shape[1]
        query, key, value = torch.split(self.qkv(self.norm(x)), WIDTH, -1)
        scores = torch.matmul(self.heads(query), self.heads(key).swapaxes(2, 3)) * (WIDTH // HEADS) ** -0.5
        mixed = torch.matmul(torch.softmax(scores + self.future[:tokens, :tokens], -1), self.heads(value))
        x = x + self.out(mixed.permute((0, 2, 1, 3)).reshape(x.shape))
        return x + self.narrow(self.relu(self.wide(self.norm_forward(x))))


class Transformer(nn.Module):
    """For sequences of at most so many tokens."""

    def __init__(self, vocabulary: int = VOCABULARY, tokens: int = TOKENS, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Embedding(tokens, WIDTH)
        self.blocks = nn.Sequential(*(Block(tokens) for _ in range(layers)))
        self.norm = nn.LayerNorm((WIDTH,), eps=EPSILON)
        self.out = nn.Linear(WIDTH, vocabulary)
        self.register_buffer("places", torch.arange(tokens))

    def forward(self, tokens):
        return self.out(self.norm(self.blocks(self.embedding(tokens) + self.position(self.places[: tokens.shape[1]]))))


def transformer() -> nn.Module:
    return Transformer()
