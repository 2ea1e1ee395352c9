"""Micro-batches by length beside the even split: ``python -m benchmarks.tokens [--rounds 5]`` .

The data are the language-model sample's, the docstrings of Python's standard library; the network is its transformer,
with four layers. An update has one batch. The way "MindSpore, by length" is MindSpore's own step on the same
micro-batches, with an update for each. If PyTorch is installed, a loop by hand trains on the same micro-batches too.
The last two ways train on texts that are all equally long.

It prints the share of padding, the tokens per second without padding, the peak memory of the process, and the share of
an update's time that laying out the batch takes.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks import controller, report, ways
from benchmarks.rows import Row
from benchmarks.ways import Program, Way
from benchmarks.worker import timed

SAMPLE = Path(__file__).resolve().parents[1] / "sample_code" / "language_model"
VOCABULARY, WIDTH, HEADS = 2000, 256, 8

Batch = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Setting(ways.Setting):
    """Also the most words of a text, the most tokens of a micro-batch (with the even split, and by length), the most
    widths, and the network's layers. `batch` counts texts."""

    longest: int = 128
    even_tokens: int = 1024
    max_tokens: int = 1024
    widths: int = 4
    layers: int = 4
    module = "benchmarks.tokens"

    @property
    def described(self) -> Way:
        return WAYS[self.way]


def sample(module: str) -> Any:
    """A module of the sample's folder."""
    if str(SAMPLE) not in sys.path:
        sys.path.insert(0, str(SAMPLE))
    return importlib.import_module(module)


@functools.cache
def corpus_of(longest: int) -> Any:
    """The sample's texts. To read them takes seconds."""
    return sample("corpus").Corpus(longest, VOCABULARY)


def lengths_of(labels: np.ndarray) -> np.ndarray:
    return (labels != sample("corpus").IGNORED).sum(1)


def batches(setting: Setting, equal: bool) -> Callable[[], Batch]:
    """A function that returns the next batch of the corpus, or of random texts that are equally long. They have no end,
    and an order that is always the same."""
    random, corpus = np.random.default_rng(0), corpus_of(setting.longest)

    def following() -> Batch:
        if equal:
            tokens = random.integers(3, VOCABULARY, (2, setting.batch, setting.longest), dtype=np.int32)
            return tokens[0], tokens[1]
        texts = [corpus[index] for index in random.choice(len(corpus), setting.batch, replace=False)]
        return np.stack([text[0] for text in texts]), np.stack([text[1] for text in texts])

    return following


def max_tokens_split(setting: Setting, equal: bool) -> Any:
    from gaccum_ms import MaxTokens

    return MaxTokens(
        setting.max_tokens,
        length=lambda tokens, labels: lengths_of(labels.asnumpy()),
        widths=setting.widths,
        lengths=[setting.longest] if equal else [*corpus_of(setting.longest).lengths, setting.longest],
        padding=(sample("corpus").NOTHING, sample("corpus").IGNORED),
    )


def laid_out(split: Any, batch: Batch) -> list[tuple[Any, ...]]:
    """The micro-batches of a batch, as Tensors of MindSpore."""
    import mindspore as ms

    return split(*map(ms.Tensor, batch))


def _program(
    setting: Setting, equal: bool, weight: Callable[[], np.ndarray], update: Callable[[Batch], float], split: Any
) -> Program:
    """Shared by all ways. `split` lays out a batch, and then knows its plan; None for the even split."""
    following = batches(setting, equal)
    updates: list[tuple[int, float]] = []  # of each update the tokens, and the share of padding

    def step() -> float:
        batch = following()
        loss = update(batch)
        tokens = int(lengths_of(batch[1]).sum())
        updates.append((tokens, 1 - tokens / batch[1].size if split is None else split.plan.padding))
        return loss

    def details() -> dict[str, Any]:
        batch = following()
        planning = 0.0 if split is None else median(timed(lambda: laid_out(split, batch)) for _ in range(5))
        return {"updates": updates, "planning": planning}

    return Program(step, weight, weight().nbytes, "as the framework chooses", details)


def language_model(setting: Setting) -> Any:
    """The sample's network, in graph mode."""
    import mindspore as ms

    ms.set_context(mode=ms.GRAPH_MODE)
    return sample("train").LanguageModel(VOCABULARY, setting.longest, WIDTH, HEADS, setting.layers)


def _mindspore_program(setting: Setting, equal: bool, network: Any, update: Callable[..., Any], split: Any) -> Program:
    (weight, *_) = network.trainable_params()
    return _program(setting, equal, lambda: weight.asnumpy().copy(), update, split)


def ours(setting: Setting, by_length: bool = False, equal: bool = False) -> Program:
    """Our step, with an even split or `MaxTokens` ."""
    import mindspore as ms
    from mindspore import nn

    from gaccum_ms import CountNotIgnored, GradAccumulationCell, TrainOneStepWithGradAccumulationCell

    split = max_tokens_split(setting, equal) if by_length else None
    network = language_model(setting)
    cut = {"split": split} if by_length else {"micro_batch_size": setting.even_tokens // setting.longest}
    cell = GradAccumulationCell(network, count=CountNotIgnored(sample("corpus").IGNORED), **cut)
    step = TrainOneStepWithGradAccumulationCell(cell, nn.Adam(network.trainable_params())).set_train()
    return _mindspore_program(setting, equal, network, lambda batch: float(step(*map(ms.Tensor, batch))), step.split)


def plain(setting: Setting) -> Program:
    """MindSpore's own step, with an update for each micro-batch that `MaxTokens` lays out: what the network's forward
    and backward take in MindSpore."""
    from mindspore import nn

    split, network = max_tokens_split(setting, False), language_model(setting)
    step = nn.TrainOneStepCell(network, nn.SGD(network.trainable_params())).set_train()

    def update(batch: Batch) -> float:
        return mean(float(step(*micro_batch)) for micro_batch in laid_out(split, batch))

    return _mindspore_program(setting, False, network, update, split)


def torchs(setting: Setting, by_length: bool = False) -> Program:
    """A loop by hand that adds up gradients, of equal micro-batches or of those that `MaxTokens` lays out, without
    their rows of padding."""
    import torch

    from benchmarks.torch_networks import Transformer

    split = max_tokens_split(setting, False) if by_length else None
    network = Transformer(VOCABULARY, setting.longest, setting.layers)
    optimizer = torch.optim.Adam(network.parameters())
    loss_fn = torch.nn.CrossEntropyLoss(ignore_index=sample("corpus").IGNORED, reduction="sum")
    rows = setting.even_tokens // setting.longest

    def micro_batches(batch: Batch) -> list[Batch]:
        if split is None:
            return [(batch[0][i : i + rows], batch[1][i : i + rows]) for i in range(0, len(batch[0]), rows)]
        arrays = [(tokens.asnumpy(), labels.asnumpy()) for tokens, labels in laid_out(split, batch)]
        return [(tokens[lengths_of(labels) > 0], labels[lengths_of(labels) > 0]) for tokens, labels in arrays]

    def update(batch: Batch) -> float:
        total, loss = lengths_of(batch[1]).sum(), 0.0
        optimizer.zero_grad()
        for tokens, labels in micro_batches(batch):
            scores = network(torch.from_numpy(tokens).long()).reshape(-1, VOCABULARY)
            part = loss_fn(scores, torch.from_numpy(labels).long().reshape(-1)) / total
            part.backward()
            loss += part.item()
        optimizer.step()
        return loss

    weight = next(network.parameters())
    return _program(setting, False, lambda: weight.detach().numpy().copy(), update, split)


_MINDSPORE, _TORCH = ("mindspore",), ("torch", "mindspore")
WAYS: dict[str, Way] = {
    "even split": Way("even split", _MINDSPORE, ours),
    "MaxTokens": Way("MaxTokens", _MINDSPORE, functools.partial(ours, by_length=True)),
    "MindSpore, by length": Way("MindSpore, by length", _MINDSPORE, plain),
    "PyTorch, even split": Way("PyTorch, even split", _TORCH, torchs),
    "PyTorch, by length": Way("PyTorch, by length", _TORCH, functools.partial(torchs, by_length=True)),
    "even split, equal lengths": Way("even split", _MINDSPORE, functools.partial(ours, equal=True)),
    "MaxTokens, equal lengths": Way("MaxTokens", _MINDSPORE, functools.partial(ours, by_length=True, equal=True)),
}


def _cells(row: Row) -> list[object]:
    if not row.turns:
        return [row.way, *"-" * 5, row.note]
    seconds = [turn[0] for turn in row.turns]
    updates = row.details["updates"][-len(seconds) :]
    return [
        row.way,
        f"{mean(padding for _, padding in updates):.1%}",
        report.number(median(tokens / each for (tokens, _), each in zip(updates, seconds, strict=True)), 0),
        report.number(median(seconds), 0, 1e3),
        report.number(row.peak, 0, 1e-6),
        f"{row.details['planning'] / median(seconds):.2%}",
        row.note,
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=256, help="texts")
    parser.add_argument("--longest", type=int, default=128, help="words of a text; the rest is cut off")
    parser.add_argument("--even-tokens", type=int, default=1024, help="of a micro-batch, with the even split")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of a micro-batch by length, padding included")
    parser.add_argument("--widths", type=int, default=4, help="the most widths")
    parser.add_argument("--layers", type=int, default=4, help="of the transformer")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=5)
    options = vars(parser.parse_args(arguments))
    names, rounds = options.pop("ways"), options.pop("rounds")
    settings = [Setting("language model", name, 0, **options) for name in names]
    rows = controller.measure(settings, "tokens", rounds=rounds, turn=0, limit=600, log=report.log)
    titles = ("", "padding", "tokens/s", "ms/update", "peak MB", "planning", "")
    print(report.columns(titles, map(_cells, rows)))


if __name__ == "__main__":
    main()
