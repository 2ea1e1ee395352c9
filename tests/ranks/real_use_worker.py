"""A text classifier trained through Model.train, as in scripts, by several ranks, each with its share of the same
samples (support/ranks.py), and on whole batches."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank

from gaccum_ms import FlushAccumulation, GradAccumulationCell, ProgressBar
from tests.ranks.cases import named, set_up
from tests.support.reference import as_numpy, vector
from tests.support.two_ranks import Results

WORDS, LENGTH, WIDTH = 40, 12, 16
SENTENCES, TEXT_BATCH, TEXT_STEPS, TEXT_EPOCHS = 288, 24, 5, 6
TEXT_WINDOWS = [(0, 120), (120, 240), (240, 288)]  # of an epoch's 12 batches: 5, 5, 2


def sentences(number: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Sentences of 3 to 12 words, then padding (0). Words 1 to 8 praise, 9 to 16 blame; label 1 means more praise."""
    random = np.random.default_rng(seed)
    tokens = random.integers(1, WORDS, size=(4 * number, LENGTH)).astype(np.int32)
    tokens[np.arange(LENGTH) >= random.integers(3, LENGTH + 1, size=(4 * number, 1))] = 0
    opinion = ((tokens >= 1) & (tokens <= 8)).sum(axis=1) - ((tokens >= 9) & (tokens <= 16)).sum(axis=1)
    clear = np.flatnonzero(opinion)[:number]
    return tokens[clear], (opinion[clear] > 0).astype(np.int32)


class TextClassifier(nn.Cell):
    """A transformer encoder that masks padding, and the mean over the words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.position = ms.Parameter(ops.zeros((LENGTH, WIDTH), ms.float32), name="position")
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.out = nn.Dense(WIDTH, 2)

    def construct(self, tokens):
        x = self.encoder(self.embedding(tokens) + self.position, src_key_padding_mask=tokens == 0)
        words = (tokens != 0).astype(ms.float32).expand_dims(-1)
        return self.out((x * words).sum(axis=1) / words.sum(axis=1))


def text_classifier(name: str) -> Results:
    """Train in windows of five batches, with two in an epoch's last, with FlushAccumulation and ProgressBar, in
    PyNative mode, compiled. A batch of all ranks together has the same samples for any number of ranks."""
    ms.set_seed(1)
    network, drawn = TextClassifier(), io.StringIO()
    cell = GradAccumulationCell(
        nn.WithLossCell(network, nn.CrossEntropyLoss()), 2, accumulation_steps=TEXT_STEPS, jit=True
    )
    model = ms.Model(cell, optimizer=nn.Adam(network.trainable_params(), 0.01))
    shards = {"num_shards": get_group_size(), "shard_id": get_rank()}
    data_set = ms.dataset.NumpySlicesDataset(sentences(SENTENCES, seed=1), shuffle=False, **shards)
    callbacks = [FlushAccumulation(), ProgressBar(drawn, show=True, refresh_seconds=0)]
    model.train(TEXT_EPOCHS, data_set.batch(TEXT_BATCH // get_group_size()), callbacks=callbacks)
    ms.set_context(mode=ms.PYNATIVE_MODE)
    held_out = ms.dataset.NumpySlicesDataset(sentences(400, seed=2), shuffle=False).batch(100)
    accuracy = ms.Model(network, nn.CrossEntropyLoss(), metrics={"accuracy"}).eval(held_out)["accuracy"]
    results = {"weights": vector(network.trainable_params()), "updates": as_numpy(model.train_network.update_count)}
    return named(name, results | {"drawn": drawn.getvalue(), "accuracy": accuracy})


def together(out: Path) -> Results:
    set_up()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return text_classifier("text")


def each_by_itself(out: Path) -> Results:
    """The control: ranks that do not communicate."""
    set_up()
    ms.reset_auto_parallel_context()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*their weights drift apart")
        return text_classifier("text, each by itself")


def whole(out: Path) -> Results:
    """Train on one batch for each window. Only rank 0 trains, alone."""
    if get_rank() > 0:
        return {}
    set_up()
    ms.reset_auto_parallel_context()
    ms.set_seed(1)
    network = TextClassifier()
    optimizer = nn.Adam(network.trainable_params(), 0.01)
    step = nn.TrainOneStepCell(nn.WithLossCell(network, nn.CrossEntropyLoss()), optimizer).set_train()
    columns = sentences(SENTENCES, seed=1)
    for _ in range(TEXT_EPOCHS):
        for window in TEXT_WINDOWS:
            step(*(Tensor(column[slice(*window)]) for column in columns))
    return named("whole text", {"weights": vector(network.trainable_params())})


CASES: dict[str, Callable[[Path], Results]] = {
    "text": together,
    "text, each by itself": each_by_itself,
    "whole text": whole,
}
