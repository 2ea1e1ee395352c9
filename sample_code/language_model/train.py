"""Trains a small transformer on the docstrings of Python's standard library, in micro-batches by length.

    bash run.sh                        two processes; 95 seconds on two cores
    python train.py                    one process

Texts differ in length. `BalancedSampler` deals each batch to the ranks, with nearly equal numbers of tokens.
`MaxTokens` makes micro-batches of texts of similar length. `CountNotIgnored` gives each token the same weight.
"""

import argparse
import os
import time

import mindspore as ms
import numpy as np
from corpus import IGNORED, Corpus
from matplotlib.figure import Figure
from mindspore import Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init

from gaccum_ms import BalancedSampler, CountNotIgnored, GradAccumulationCell, MaxTokens, tune_cpu


class Block(nn.Cell):
    """Causal attention, and two dense layers."""

    def __init__(self, size, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm([size]), nn.LayerNorm([size])
        self.query_key_value = nn.Dense(size, 3 * size)
        self.out = nn.Dense(size, size)
        self.dense = nn.SequentialCell(nn.Dense(size, 4 * size), nn.ReLU(), nn.Dense(4 * size, size))

    def construct(self, x, hidden):
        rows, width, size = x.shape
        parts = self.query_key_value(self.norm1(x)).reshape((rows, width, 3, self.heads, size // self.heads))
        query, key, value = parts.transpose((2, 0, 3, 1, 4))
        scores = query @ key.swapaxes(2, 3) / (size // self.heads) ** 0.5 + hidden[:width, :width]
        x = x + self.out((ops.softmax(scores) @ value).swapaxes(1, 2).reshape((rows, width, size)))
        return x + self.dense(self.norm2(x))


class LanguageModel(nn.Cell):
    """Returns the mean loss over the labelled tokens."""

    def __init__(self, vocabulary, longest, size=64, heads=4, blocks=2):
        super().__init__()
        self.vocabulary = vocabulary
        self.tokens = nn.Embedding(vocabulary, size)
        self.places = nn.Embedding(longest, size)
        self.hidden = Tensor(np.triu(np.full((longest, longest), -1e9, np.float32), 1))  # hides later tokens
        self.blocks = nn.CellList([Block(size, heads) for _ in range(blocks)])
        self.head = nn.SequentialCell(nn.LayerNorm([size]), nn.Dense(size, vocabulary))
        self.loss = nn.CrossEntropyLoss(ignore_index=IGNORED)

    def construct(self, tokens, labels):
        x = self.tokens(tokens) + self.places(ops.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, self.hidden)
        return self.loss(self.head(x).reshape((-1, self.vocabulary)), labels.reshape((-1,)))


def number_of_labels(tokens, labels):
    return (labels.asnumpy() != IGNORED).sum(1)


class Speed(ms.Callback):
    """Records the loss after each update, and prints the tokens per second of this rank at intervals."""

    def __init__(self, print_every):
        super().__init__()
        self.print_every = print_every
        self.losses, self.tokens = [], 0

    def on_train_step_end(self, run_context):
        parameters = run_context.original_args()
        self.losses.append(float(parameters.net_outputs.asnumpy()))  # over the tokens of all ranks
        plan = parameters.train_network.split.plan
        if len(self.losses) == 1:
            print(plan, flush=True)  # how the first batch was split
            self.start = time.perf_counter()
            return  # most of the first update's time was compilation
        self.tokens += plan.tokens
        if len(self.losses) % self.print_every == 0:
            speed = self.tokens / (time.perf_counter() - self.start)
            print(
                f"update {len(self.losses)}: loss {self.losses[-1]:.3f}, {speed:.0f} tokens/s on each rank", flush=True
            )


def draw(losses, plan, path):
    """Draw the loss over updates, and the last batch's micro-batches, row by row."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(range(1, len(losses) + 1), losses)
    left.set(xlabel="updates", ylabel="loss by token")
    start = 0
    for width, rows in plan.micro_batches:
        places = range(start, start + len(rows))
        right.bar(places, [width] * len(rows), width=1, color="lightgray")
        right.bar(places, [plan.lengths[row] if row >= 0 else 0 for row in rows], width=1, color="tab:blue")
        right.axvline(start - 0.5, color="black", linewidth=0.5)
        start += len(rows)
    title = f"padding {plan.padding:.1%}, without a plan {plan.padding_before:.1%}"
    right.set(xlabel="texts, micro-batch by micro-batch", ylabel="tokens", title=title)
    figure.savefig(path, dpi=80)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3, help="passes over the texts")
    parser.add_argument("--batches", type=int, help="number of batches in an epoch, by default all")
    parser.add_argument("--batch-size", type=int, default=128, help="texts of a batch on each rank")
    parser.add_argument("--max-tokens", type=int, default=1024, help="tokens in memory at once")
    parser.add_argument("--print-every", type=int, default=10, help="updates between two lines")
    parser.add_argument("--picture", default="language_model.png")
    args = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)  # every rank starts from the same weights
    ranks, rank = 1, 0
    if "MS_ROLE" in os.environ:  # the launcher has set it
        init()
        ranks, rank = get_group_size(), get_rank()
        ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)

    corpus = Corpus(longest=128, vocabulary=2000)
    network = LanguageModel(2000, 128)
    tune_cpu(network=network)
    sampler = BalancedSampler(corpus.lengths, args.batch_size, ranks, rank, seed=1)
    data_set = ms.dataset.GeneratorDataset(corpus, ["tokens", "labels"], sampler=sampler, python_multiprocessing=False)
    data_set = data_set.batch(args.batch_size, drop_remainder=True).take(args.batches or -1)
    print(f"{len(corpus)} texts of {sum(corpus.lengths)} tokens; {ranks} ranks", flush=True)

    split = MaxTokens(args.max_tokens, number_of_labels, lengths=corpus.lengths)
    cell = GradAccumulationCell(network, split=split, count=CountNotIgnored(IGNORED), max_grad_norm=1.0)
    model = ms.Model(cell, optimizer=nn.Adam(network.trainable_params(), 0.003))
    speed = Speed(args.print_every)
    model.train(args.epochs, data_set, callbacks=[speed], dataset_sink_mode=False)

    if rank == 0:
        draw(speed.losses, model.train_network.split.plan, args.picture)
        print(f"picture: {args.picture}", flush=True)
    if ranks > 1:
        ops.AllReduce()(Tensor([1.0])).asnumpy()  # a rank that leaves early breaks the others' last one


if __name__ == "__main__":
    main()
