"""A small language model on padded sequences of very different lengths, which needs `count=` ."""

from __future__ import annotations

import functools
from collections.abc import Callable

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from gaccum_ms import CountNotIgnored
from tests.support import reference
from tests.support.modes import eagerly

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 50, 12, 16, 2, 1
SEQUENCES, UPDATES = 8, 20
IGNORED = -100


class Block(nn.Cell):
    """Causal self-attention and a feed-forward network, each with normalisation before and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((WIDTH,))
        self.qkv = nn.Dense(WIDTH, 3 * WIDTH)
        self.out = nn.Dense(WIDTH, WIDTH)
        self.norm_forward = nn.LayerNorm((WIDTH,))
        self.wide = nn.Dense(WIDTH, 2 * WIDTH)
        self.narrow = nn.Dense(2 * WIDTH, WIDTH)
        self.future = Tensor(np.triu(np.full((LENGTH, LENGTH), -1e9), 1), ms.float32)

    def construct(self, x):
        batch = x.shape[0]
        heads = self.qkv(self.norm(x)).reshape((batch, LENGTH, 3, HEADS, WIDTH // HEADS)).transpose((2, 0, 3, 1, 4))
        scores = ops.matmul(heads[0], heads[1].swapaxes(2, 3)) / (WIDTH // HEADS) ** 0.5 + self.future
        mixed = ops.matmul(ops.softmax(scores, -1), heads[2]).transpose((0, 2, 1, 3))
        x = x + self.out(mixed.reshape((batch, LENGTH, WIDTH)))
        return x + self.narrow(ops.tanh(self.wide(self.norm_forward(x))))


class LanguageModel(nn.Cell):
    """Mean cross entropy of the next token, over the labels that are not padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = ms.Parameter(ops.zeros((LENGTH, WIDTH), ms.float32), name="position")
        self.blocks = nn.CellList([Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm((WIDTH,))
        self.out = nn.Dense(WIDTH, VOCABULARY)
        self.loss = nn.CrossEntropyLoss()
        random = np.random.default_rng(11)
        for parameter in self.trainable_params():
            value = random.normal(size=parameter.shape) * 0.2 + ("gamma" in parameter.name)
            parameter.set_data(Tensor(value, ms.float32))

    def construct(self, tokens, labels):
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.loss(self.out(self.norm(x)).reshape((-1, VOCABULARY)), labels.reshape((-1,)))


def batch(update: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences that follow one rule, padded. A sequence of one token has no label at all."""
    random = np.random.default_rng(100 + update)
    tokens = np.zeros((SEQUENCES, LENGTH), np.int32)
    tokens[:, 0] = random.integers(VOCABULARY, size=SEQUENCES)
    for place in range(1, LENGTH):
        tokens[:, place] = (3 * tokens[:, place - 1] + 1) % VOCABULARY
    lengths = random.permutation([1, 1, 2, 3, 6, LENGTH, LENGTH, LENGTH])
    if update % 4 == 0:
        lengths = np.sort(lengths)  # one micro-batch then has no labels, and one rank far fewer than the other
    labels = np.full_like(tokens, IGNORED)
    labels[:, :-1] = tokens[:, 1:]
    labels[np.arange(LENGTH) >= lengths[:, None] - 1] = IGNORED
    tokens[np.arange(LENGTH) >= lengths[:, None]] = 0
    return tokens, labels


def train(make_step: Callable, updates: int = UPDATES, share: slice = slice(None)) -> tuple[np.ndarray, np.ndarray]:
    """Train on `share` of each batch; returns the losses and all weights in one vector."""
    network = LanguageModel()
    step = make_step(network, nn.Momentum(network.trainable_params(), 0.1, 0.9)).set_train()
    losses = [float(step(*(Tensor(value[share]) for value in batch(update))).asnumpy()) for update in range(updates)]
    return np.array(losses), reference.vector(network.trainable_params())


def accumulated(micro_size: int, **options) -> Callable:
    """A ``make_step`` for `train`: our step, counting labels unless `options` say otherwise."""
    return reference.accumulated(micro_size=micro_size, **{"count": CountNotIgnored(), **options})


@functools.cache
@eagerly()
def whole_batch() -> tuple[np.ndarray, np.ndarray]:
    """The reference: MindSpore's own step on whole batches, in one process."""
    return train(nn.TrainOneStepCell)
