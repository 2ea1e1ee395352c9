"""The cost of a batch of a new length: ``python -m benchmarks.lengths [--lengths 6] [--micro-size 4]`` .

A graph is compiled for fixed shapes. The benchmark measures the first call of a small transformer with each length, in
seconds of wall-clock and CPU time. It compares MindSpore's own step, our step, our step after `set_inputs` has left the
lengths open, which compiles once, and a bare loop, the smallest graph that accumulates. The difference between the bare
loop and MindSpore's step is what MindSpore's compiler needs for a loop. The four take turns.
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


class BareLoop(nn.Cell):
    """A loop over equal micro-batches that adds up their gradients, and an update, without options and checks."""

    def __init__(self, network: nn.Cell, optimizer: nn.Optimizer, micro_size: int) -> None:
        super().__init__()
        self.network = network
        self.optimizer = optimizer
        self.micro_size = micro_size
        self.sums = optimizer.parameters.clone("sums", init="zeros")
        self.backward = ops.value_and_grad(network, None, optimizer.parameters)
        self.map = ops.HyperMap()
        self.add = ops.AssignAdd()
        self.set = ops.Assign()

    def construct(self, x, y):
        size = x.shape[0] // self.micro_size
        start, total = Tensor(0, ms.int32), Tensor(0.0, ms.float32)
        while start < x.shape[0]:
            rows = start + ops.arange(size)
            loss, gradients = self.backward(ops.gather(x, rows, 0), ops.gather(y, rows, 0))
            total = total + ops.depend(loss, self.map(self.add, self.sums, gradients))
            start = start + size
        updated = self.optimizer(ops.depend(self.sums, total))
        cleared = self.map(self.set, ops.depend(self.sums, updated), self.map(ops.zeros_like, self.sums))
        return ops.depend(total / self.micro_size, cleared)


def steps(network: Callable[[], nn.Cell], micro_size: int) -> dict[str, nn.Cell]:
    def ours() -> nn.Cell:
        cell = GradAccumulationCell(nn.WithLossCell(network(), TokenLoss()), micro_size)
        return TrainOneStepWithGradAccumulationCell(cell, nn.Adam(cell.trainable_params()))

    whole, bare = (nn.WithLossCell(network(), TokenLoss()) for _ in range(2))
    ways = {
        "nn.TrainOneStepCell": nn.TrainOneStepCell(whole, nn.Adam(whole.trainable_params())),
        "a bare loop": BareLoop(bare, nn.Adam(bare.trainable_params()), micro_size),
        "gaccum_ms": ours(),
        "gaccum_ms, set_inputs": ours(),
    }
    ways["gaccum_ms, set_inputs"].set_inputs(*[Tensor(shape=[None, None], dtype=ms.int32)] * 2)
    return {way: step.set_train() for way, step in ways.items()}


def measure(taking_turns: dict[str, nn.Cell], lengths: int, batch: int) -> dict[str, list[tuple[float, float]]]:
    """Wall-clock and CPU seconds of the first call of each step with each length, by way."""
    ms.set_context(mode=ms.GRAPH_MODE)
    random = np.random.default_rng(0)
    seconds: dict[str, list[tuple[float, float]]] = {}
    for length in range(SHORTEST, SHORTEST + lengths):
        tokens = [Tensor(random.integers(0, VOCABULARY, (batch, length), dtype=np.int32)) for _ in range(2)]
        for way, step in taking_turns.items():
            begin, begin_cpu = time.perf_counter(), time.process_time()
            step(*tokens).asnumpy()
            taken = time.perf_counter() - begin, time.process_time() - begin_cpu
            seconds.setdefault(way, []).append(taken)
    return seconds


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", type=int, default=6, help="how many, of which the first is told apart")
    parser.add_argument("--micro-size", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    options = parser.parse_args(arguments)
    measured = measure(steps(transformer, options.micro_size), options.lengths, options.batch)
    for way, (first, *others) in measured.items():
        clock, cpu = (statistics.median(values) for values in zip(*others, strict=True))
        print(f"{way:24} first length {first[0]:5.1f} s, each other {clock:5.2f} s, {cpu:5.2f} s of CPU (medians)")


if __name__ == "__main__":
    main()
