"""Micro-batches by length beside the even split: ``python -m benchmarks.tokens [--rounds 5]`` .

The data are the language-model sample's, the docstrings of Python's standard library; the network is its transformer,
with four layers. An update has one batch. Each way has a process of its own, and they take turns. The way "MindSpore,
by length" is MindSpore's own step on the same micro-batches, with an update for each. If PyTorch is installed, a loop
by hand trains on the same micro-batches too. The last two ways train on texts that are all equally long.

It prints the share of padding, the tokens per second without padding, the peak memory of the process, the number of
compiled graphs, and the share of an update's time that laying out the batch takes.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.worker import peak_memory

SAMPLE = Path(__file__).resolve().parents[1] / "sample_code" / "language_model"
VOCABULARY, WIDTH, HEADS = 2000, 256, 8
WARM_UP = 2  # updates

Batch = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Sizes:
    """The texts of a batch, the most words of a text, the most tokens of a micro-batch (with the even split, and by
    length), the most widths, and the network's layers."""

    batch: int
    longest: int
    even_tokens: int
    max_tokens: int
    widths: int = 4
    layers: int = 4


def sample(module: str) -> Any:
    """A module of the sample's folder."""
    if str(SAMPLE) not in sys.path:
        sys.path.insert(0, str(SAMPLE))
    return importlib.import_module(module)


def corpus_of(longest: int) -> Any:
    """The sample's texts. To read them takes seconds."""
    return sample("corpus").Corpus(longest, VOCABULARY)


def lengths_of(labels: np.ndarray) -> np.ndarray:
    return (labels != sample("corpus").IGNORED).sum(1)


class Data:
    """Batches of a corpus without end, in an order that is always the same."""

    def __init__(self, corpus: Any, sizes: Sizes, equal: bool) -> None:
        self.sizes = sizes
        self.equal = equal
        self.random = np.random.default_rng(0)
        self.corpus = corpus

    def next(self) -> Batch:
        if self.equal:
            tokens = self.random.integers(3, VOCABULARY, (2, self.sizes.batch, self.sizes.longest), dtype=np.int32)
            return tokens[0], tokens[1]
        texts = [self.corpus[index] for index in self.random.choice(len(self.corpus), self.sizes.batch, replace=False)]
        return np.stack([one[0] for one in texts]), np.stack([one[1] for one in texts])


def max_tokens_split(data: Data) -> Any:
    from gaccum_ms import MaxTokens

    return MaxTokens(
        data.sizes.max_tokens,
        length=lambda tokens, labels: lengths_of(labels.asnumpy()),
        widths=data.sizes.widths,
        lengths=[data.sizes.longest] if data.equal else [*data.corpus.lengths, data.sizes.longest],
        padding=(sample("corpus").NOTHING, sample("corpus").IGNORED),
    )


def language_model(data: Data) -> Any:
    """The sample's network, in graph mode."""
    import mindspore as ms

    ms.set_context(mode=ms.GRAPH_MODE)
    return sample("train").LanguageModel(VOCABULARY, data.sizes.longest, WIDTH, HEADS, data.sizes.layers)


class MindSporeWay:
    """Our step, with an even split or `MaxTokens` ."""

    def __init__(self, data: Data, by_length: bool) -> None:
        import mindspore as ms
        from mindspore import nn

        from gaccum_ms import CountNotIgnored, GradAccumulationCell, TrainOneStepWithGradAccumulationCell

        self.tensor = ms.Tensor
        self.split = max_tokens_split(data) if by_length else None
        network = language_model(data)
        cut = {"split": self.split} if by_length else {"micro_batch_size": data.sizes.even_tokens // data.sizes.longest}
        cell = GradAccumulationCell(network, count=CountNotIgnored(sample("corpus").IGNORED), **cut)
        self.step = TrainOneStepWithGradAccumulationCell(cell, nn.Adam(network.trainable_params())).set_train()

    def update(self, batch: Batch) -> float:
        return float(self.step(*map(self.tensor, batch)).asnumpy())

    def plan(self, batch: Batch) -> None:
        if self.split is not None:
            self.split(*map(self.tensor, batch))

    @property
    def padding(self) -> float | None:
        return None if self.split is None else self.split.plan.padding

    @property
    def graphs(self) -> int:
        cells = {id(one): one for _, one in self.step.cells_and_names()}
        split = getattr(self.step, "_split", None)
        if split is not None:
            cells[id(split._graph)] = split._graph
        return sum(len(one.compile_cache) for one in cells.values())


class PlainWay:
    """MindSpore's own step, with an update for each micro-batch that `MaxTokens` lays out: what the network's forward
    and backward take in MindSpore."""

    def __init__(self, data: Data, by_length: bool) -> None:
        import mindspore as ms
        from mindspore import nn

        self.tensor = ms.Tensor
        self.split = max_tokens_split(data)
        network = language_model(data)
        self.step = nn.TrainOneStepCell(network, nn.SGD(network.trainable_params())).set_train()

    def update(self, batch: Batch) -> None:
        for micro_batch in self.split(*map(self.tensor, batch)):
            self.step(*micro_batch).asnumpy()

    def plan(self, batch: Batch) -> None:
        pass

    @property
    def padding(self) -> float:
        return self.split.plan.padding

    @property
    def graphs(self) -> int:
        return len(self.step.compile_cache)


class TorchWay:
    """A loop by hand that adds up gradients, of equal micro-batches or of those that `MaxTokens` lays out."""

    graphs = 0

    def __init__(self, data: Data, by_length: bool) -> None:
        import torch

        from benchmarks.torch_networks import Transformer

        self.torch, self.sizes = torch, data.sizes
        self.split = max_tokens_split(data) if by_length else None
        self.network = Transformer(VOCABULARY, data.sizes.longest, data.sizes.layers)
        self.optimizer = torch.optim.Adam(self.network.parameters())
        self.loss = torch.nn.CrossEntropyLoss(ignore_index=sample("corpus").IGNORED, reduction="sum")
        self.padding: float | None = None

    def micro_batches(self, batch: Batch) -> list[Batch]:
        rows = self.sizes.even_tokens // self.sizes.longest
        if self.split is None:
            return [(batch[0][i : i + rows], batch[1][i : i + rows]) for i in range(0, len(batch[0]), rows)]
        from gaccum_ms.splitting.token_plan import plan_tokens

        lengths = np.maximum(lengths_of(batch[1]), 1)
        plan = plan_tokens(lengths, self.sizes.longest, self.split.widths, self.sizes.max_tokens)
        self.padding = plan.padding
        made = [(rows[rows >= 0], width) for width, rows in plan.parts]
        return [(batch[0][rows, :width], batch[1][rows, :width]) for rows, width in made]

    def update(self, batch: Batch) -> None:
        total = lengths_of(batch[1]).sum()
        self.optimizer.zero_grad()
        for tokens, labels in self.micro_batches(batch):
            scores = self.network(self.torch.from_numpy(tokens).long())
            wanted = self.torch.from_numpy(labels).long().reshape(-1)
            (self.loss(scores.reshape(-1, VOCABULARY), wanted) / total).backward()
        self.optimizer.step()

    def plan(self, batch: Batch) -> None:
        self.micro_batches(batch)


# Kind, whether by length, whether all texts are equally long.
WAYS: dict[str, tuple[Callable[..., Any], bool, bool]] = {
    "even split": (MindSporeWay, False, False),
    "MaxTokens": (MindSporeWay, True, False),
    "MindSpore, by length": (PlainWay, True, False),
    "PyTorch, even split": (TorchWay, False, False),
    "PyTorch, by length": (TorchWay, True, False),
    "even split, equal lengths": (MindSporeWay, False, True),
    "MaxTokens, equal lengths": (MindSporeWay, True, True),
}


def installed_ways() -> list[str]:
    """The names of the ways whose packages are installed."""
    return [name for name in WAYS if not name.startswith("PyTorch") or importlib.util.find_spec("torch")]


def work(name: str, corpus: Any, sizes: Sizes, pipe: Any) -> None:
    """In the process of one way: one update for each word from the controller, until it says no more."""
    kind, by_length, equal = WAYS[name]
    data = Data(corpus, sizes, equal)
    way = kind(data, by_length)
    for _ in range(WARM_UP):
        way.update(data.next())
    pipe.send(None)
    while pipe.recv():
        batch = data.next()
        begin = time.perf_counter()
        way.update(batch)
        end = time.perf_counter()
        way.plan(batch)
        planning = time.perf_counter() - end
        tokens = int(lengths_of(batch[1]).sum())
        padding = way.padding if way.padding is not None else 1 - tokens / batch[1].size
        pipe.send((end - begin, planning, tokens, padding))
    pipe.send((peak_memory(), way.graphs))


def measure(sizes: Sizes, rounds: int, names: list[str]) -> dict[str, tuple[list[tuple], tuple]]:
    """For each way: what `work` measured of its updates; its peak memory in bytes, and its number of graphs."""
    context, corpus = multiprocessing.get_context("spawn"), corpus_of(sizes.longest)
    pipes, processes = {}, []
    found: dict[str, tuple[list[tuple], tuple]] = {}
    try:
        for name in names:  # one after the other: compilations disturb each other
            pipes[name], other = context.Pipe()
            processes.append(context.Process(target=work, args=(name, corpus, sizes, other), daemon=True))
            processes[-1].start()
            other.close()
            pipes[name].recv()
            found[name] = ([], ())
        for _ in range(rounds):
            for name in names:
                pipes[name].send(True)
                found[name][0].append(pipes[name].recv())
        for name in names:
            pipes[name].send(False)
            found[name] = (found[name][0], pipes[name].recv())
        return found
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=256, help="texts")
    parser.add_argument("--longest", type=int, default=128, help="words of a text; the rest is cut off")
    parser.add_argument("--even-tokens", type=int, default=1024, help="of a micro-batch, with the even split")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of a micro-batch by length, padding included")
    parser.add_argument("--widths", type=int, default=Sizes.widths, help="the most widths")
    parser.add_argument("--layers", type=int, default=Sizes.layers, help="of the transformer")
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="default: all whose packages are installed")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    sizes = Sizes(
        options.batch, options.longest, options.even_tokens, options.max_tokens, options.widths, options.layers
    )
    print(f"{'':26}{'padding':>9}{'tokens/s':>10}{'ms/update':>11}{'peak MB':>9}{'graphs':>8}{'planning':>10}")
    for name, (rounds, (peak, graphs)) in measure(sizes, options.rounds, options.ways or installed_ways()).items():
        seconds, planning, tokens, padding = map(np.array, zip(*rounds, strict=True))
        speed = statistics.median(tokens / seconds)
        share = statistics.median(planning / seconds)
        print(
            f"{name:26}{padding.mean():9.1%}{speed:10.0f}{1000 * statistics.median(seconds):11.0f}{peak / 1e6:9.0f}"
            f"{graphs or '':>8}{share:10.2%}"
        )


if __name__ == "__main__":
    main()
