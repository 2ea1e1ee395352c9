"""Two towers learn to match the left and right halves of handwritten digits, with a contrastive loss.

    bash run.sh                        25 seconds on two cores

The loss compares each half with all others of the batch. `WithBatchLossCell` computes it over the whole batch, with one
micro-batch in memory. For comparison, the second training computes a separate loss for each micro-batch.
"""

import argparse

import mindspore as ms
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from mindspore import Tensor, nn, ops
from sklearn.datasets import load_digits

from gaccum_ms import GradAccumulationCell, ProgressBar, WithBatchLossCell, tune_cpu


def halves():
    """Left and right halves of scikit-learn's digits, 8×4 pixels: 1,437 training pairs, and 360 held-out pairs."""
    images = load_digits().images.astype(np.float32) / 8 - 1
    images = images[np.random.default_rng(0).permutation(len(images))]
    return [(part[:, :, :4], part[:, :, 4:]) for part in (images[:1437], images[1437:])]


class Towers(nn.Cell):
    """A tower for each half. Both return vectors of length 1."""

    def __init__(self, size=32):
        super().__init__()
        self.left = nn.SequentialCell(nn.Flatten(), nn.Dense(32, 256), nn.ReLU(), nn.Dense(256, size))
        self.right = nn.SequentialCell(nn.Flatten(), nn.Dense(32, 256), nn.ReLU(), nn.Dense(256, size))
        self.normalize = ops.L2Normalize(1)

    def construct(self, left, right):
        return self.normalize(self.left(left)), self.normalize(self.right(right))


class InfoNCE(nn.Cell):
    """Classifies each half's counterpart among all halves of the batch, in both directions."""

    def __init__(self):
        super().__init__()
        self.log_scale = ms.Parameter(Tensor(2.0, ms.float32), name="log_scale")

    def construct(self, left, right):
        logits = left @ right.T * ops.exp(self.log_scale)
        own = ops.arange(left.shape[0])
        return (ops.cross_entropy(logits, own) + ops.cross_entropy(logits.T, own)) / 2


class LossOfEachMicroBatch(nn.Cell):
    """Accumulation without `WithBatchLossCell` : each half is compared only with the others of its micro-batch."""

    def __init__(self, towers, loss_fn):
        super().__init__(auto_prefix=False)
        self.towers = towers
        self.loss_fn = loss_fn

    def construct(self, left, right):
        return self.loss_fn(*self.towers(left, right))


class Retrieval(ms.Callback):
    """Records after each epoch how often the right half of a held-out digit is among the five nearest to the left."""

    def __init__(self, towers, held_out):
        super().__init__()
        self.towers = towers
        self.pair = [Tensor(np.ascontiguousarray(half)) for half in held_out]
        self.rates = []

    def similarities(self):
        left, right = self.towers(*self.pair)
        return left.asnumpy() @ right.asnumpy().T

    def on_train_epoch_end(self, run_context):
        similarities = self.similarities()
        nearer = (similarities > similarities.diagonal()[:, None]).sum(1)
        self.rates.append(float((nearer < 5).mean()))


def train(network, args, pairs, held_out):
    """Train towers with this kind of network and loss; return the retrieval rates after each epoch."""
    ms.set_seed(1)
    ms.dataset.config.set_seed(1)
    towers = Towers()
    net = network(towers, InfoNCE())
    data_set = ms.dataset.NumpySlicesDataset(pairs, shuffle=True).batch(args.batch_size)
    cell = GradAccumulationCell(net, micro_batch_size=args.micro_batch_size)
    model = ms.Model(cell, optimizer=nn.Adam(net.trainable_params(), 0.003))
    retrieval = Retrieval(towers, held_out)
    model.train(args.epochs, data_set, callbacks=[retrieval, ProgressBar()], dataset_sink_mode=False)
    return retrieval


def draw(curves, retrieval, held_out, path):
    """Draw the retrieval rates over epochs, and some left halves with the nearest right halves."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, rates in curves.items():
        left.plot(range(1, len(rates) + 1), rates, label=name)
    left.set(xlabel="epochs", ylabel="own half among the 5 nearest", ylim=(0, None))
    left.legend()
    best = retrieval.similarities()[:24].argmax(1)
    joined = np.concatenate([held_out[0][:24], held_out[1][best]], axis=2)  # digits of 8×8 pixels again
    framed = np.pad(joined, ((0, 0), (1, 1), (1, 1)), constant_values=-1)
    right.imshow(np.vstack([np.hstack(framed[start : start + 8]) for start in range(0, 24, 8)]), cmap="gray_r")
    for place in np.flatnonzero(best == np.arange(24)):
        corner = place % 8 * 10 - 0.5, place // 8 * 10 - 0.5
        right.add_patch(Rectangle(corner, 10, 10, fill=False, edgecolor="tab:green", linewidth=2))
    right.set(xticks=[], yticks=[], title="left halves, each with its nearest; green: its own")
    figure.savefig(path, dpi=80)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=480, help="pairs that are compared")
    parser.add_argument("--micro-batch-size", type=int, default=16, help="pairs in memory at once")
    parser.add_argument("--pairs", type=int, help="number of training pairs, by default all")
    parser.add_argument("--picture", default="contrastive.png")
    args = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE)
    pairs, held_out = halves()
    pairs = tuple(half[: args.pairs] for half in pairs)
    tune_cpu(network=Towers())

    curves = {}
    for name, network in (
        ("each micro-batch's loss", LossOfEachMicroBatch),
        ("the batch's loss: WithBatchLossCell", WithBatchLossCell),
    ):
        retrieval = train(network, args, pairs, held_out)
        curves[name] = retrieval.rates
        print(f"{name}: {retrieval.rates[-1]:.1%} of the left halves find their right half", flush=True)
    draw(curves, retrieval, held_out, args.picture)
    print(f"picture: {args.picture}")


if __name__ == "__main__":
    main()
