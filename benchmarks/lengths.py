"""What a batch of a new length costs: ``python -m benchmarks.lengths [--lengths 6] [--micro-size 4]`` .

A graph is compiled for shapes. The first call of a small transformer with each length, in seconds, by MindSpore's own
step, by ours, and by ours after `set_inputs` has left the lengths open, which compiles once. The three take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from benchmarks.mindspore_networks import TokenLoss
from benchmarks.networks import VOCABULARY
from gaccum_ms import GradAccumulationCell, TrainOneStepWithGradAccumulationCell

SHORTEST = 16  # tokens
WIDTH, HEADS, LAYERS = 64, 4, 2


class Block(nn.Cell):
    """Attention and a feed-forward network, for sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((WIDTH,))
        self.qkv = nn.Dense(WIDTH, 3 * WIDTH)
        self.out = nn.Dense(WIDTH, WIDTH)
        self.norm_forward = nn.LayerNorm((WIDTH,))
        self.wide = nn.Dense(WIDTH, 4 * WIDTH, activation="relu")
        self.narrow = nn.Dense(4 * WIDTH, WIDTH)

    def heads(self, x):
        return x.reshape((x.shape[0], -1, HEADS, WIDTH // HEADS)).transpose((0, 2, 1, 3))

    def construct(self, x):
        query, key, value = ops.split(self.qkv(self.norm(x)), WIDTH, -1)
        scores = ops.matmul(self.heads(query), self.heads(key).swapaxes(2, 3)) * (WIDTH // HEADS) ** -0.5
        mixed = ops.matmul(ops.softmax(scores, -1), self.heads(value)).transpose((0, 2, 1, 3))
        x = x + self.out(mixed.reshape((x.shape[0], -1, WIDTH)))
        return x + self.narrow(self.wide(self.norm_forward(x)))


def transformer() -> nn.Cell:
    return nn.SequentialCell(
        [nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(LAYERS)), nn.Dense(WIDTH, VOCABULARY)]
    )


def _steps(network: Callable[[], nn.Cell], micro_size: int) -> dict[str, nn.Cell]:
    def ours() -> nn.Cell:
        cell = GradAccumulationCell(nn.WithLossCell(network(), TokenLoss()), micro_size)
        return TrainOneStepWithGradAccumulationCell(cell, nn.Adam(cell.trainable_params()))

    whole = nn.WithLossCell(network(), TokenLoss())
    steps = {
        "nn.TrainOneStepCell": nn.TrainOneStepCell(whole, nn.Adam(whole.trainable_params())),
        "gaccum_ms": ours(),
        "gaccum_ms, set_inputs": ours(),
    }
    steps["gaccum_ms, set_inputs"].set_inputs(*[Tensor(shape=[None, None], dtype=ms.int32)] * 2)
    return {way: step.set_train() for way, step in steps.items()}


def measure(
    lengths: int, micro_size: int, batch: int, network: Callable[[], nn.Cell] = transformer
) -> dict[str, list[float]]:
    """Seconds of the first call with each length, by way."""
    ms.set_context(mode=ms.GRAPH_MODE)
    random = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {}
    steps = _steps(network, micro_size)
    for length in range(SHORTEST, SHORTEST + lengths):
        tokens = [Tensor(random.integers(0, VOCABULARY, (batch, length), dtype=np.int32)) for _ in range(2)]
        for way, step in steps.items():
            begin = time.perf_counter()
            step(*tokens).asnumpy()
            seconds.setdefault(way, []).append(time.perf_counter() - begin)
    return seconds


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", type=int, default=6, help="how many, of which the first is told apart")
    parser.add_argument("--micro-size", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    options = parser.parse_args(arguments)
    for way, (first, *others) in measure(options.lengths, options.micro_size, options.batch).items():
        print(
            f"{way:24} first length {first:5.1f} s, each other: {statistics.median(others):6.2f} s (median)", flush=True
        )


if __name__ == "__main__":
    main()
