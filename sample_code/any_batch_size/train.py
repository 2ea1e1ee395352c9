"""From a small batch to a large one: measures the gradient noise, and follows it in two ways.

    bash run.sh                        25 seconds on two cores

Three trainings on the same handwritten digits:

* batches of 16
* AdaptiveAccumulation   1 to 16 of these batches share an update, according to the noise scale; the rate follows
* batches of 128         8 of them share an update, with the same rate
"""

import argparse

import mindspore as ms
import numpy as np
from matplotlib.figure import Figure
from mindspore import Tensor, nn
from sklearn.datasets import load_digits

from gaccum_ms import (
    AdaptiveAccumulation,
    FlushAccumulation,
    GradAccumulationCell,
    GradNoiseScale,
    ProgressBar,
    tune_cpu,
)

RATE = 0.04  # of SGD, for batches of 16


def digits():
    """scikit-learn's 1,797 digits, 64 numbers each: training images and labels, and held-out ones."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images, labels = data.data[order].astype(np.float32) / 8 - 1, data.target[order].astype(np.int32)
    return (images[:1408], labels[:1408]), (images[1408:], labels[1408:])


class Curve(ms.Callback):
    """Records after each epoch the number of updates and the loss on held-out digits."""

    def __init__(self, network, held_out):
        super().__init__()
        self.network = nn.WithLossCell(network, nn.CrossEntropyLoss())
        self.held_out = [Tensor(array) for array in held_out]
        self.updates, self.losses = [], []

    def on_train_epoch_end(self, run_context):
        step = run_context.original_args().train_network
        self.updates.append(int(step.update_count.asnumpy()))
        self.losses.append(float(self.network(*self.held_out)))


def train(data, epochs, batches=1, more=()):
    """Train with `batches` batches of 16 in each update; return the curve and the noise."""
    ms.set_seed(1)
    ms.dataset.config.set_seed(1)
    train_set, held_out = data
    network = nn.SequentialCell(nn.Dense(64, 128), nn.ReLU(), nn.Dense(128, 10))
    cell = GradAccumulationCell(
        nn.WithLossCell(network, nn.CrossEntropyLoss()),
        micro_batch_size=8,
        accumulation_steps=batches,
        record_noise=True,
    )
    noise, curve = GradNoiseScale(smoothing=0.95), Curve(network, held_out)
    data_set = ms.dataset.NumpySlicesDataset(train_set, shuffle=True).batch(16)
    model = ms.Model(cell, optimizer=nn.SGD(network.trainable_params(), RATE))
    callbacks = [noise, *more, curve, FlushAccumulation(each_epoch=False), ProgressBar()]
    model.train(epochs, data_set, callbacks=callbacks, dataset_sink_mode=False)
    return curve, noise


def draw(curves, noise, path):
    """Draw the loss over updates, and the batch of AdaptiveAccumulation beside the noise scale that it follows."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, curve in curves.items():
        left.plot(curve.updates, curve.losses, label=name)
    left.set(xlabel="updates", ylabel="loss on held-out digits", xscale="log", yscale="log")
    left.legend(fontsize="small")
    updates = [record.update for record in noise.records]
    right.plot(updates, [record.noise_scale for record in noise.records], label="noise scale")
    right.plot(updates, [record.batch_size for record in noise.records], label="batch")
    right.set(xlabel="updates", ylabel="samples", yscale="log", ylim=(8, None), title="AdaptiveAccumulation")
    right.legend()
    figure.savefig(path, dpi=80)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--samples", type=int, help="number of training samples, by default all")
    parser.add_argument("--picture", default="any_batch_size.png")
    args = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE)
    tune_cpu(network=nn.Dense(1, 1))
    train_set, held_out = digits()
    data = tuple(array[: args.samples] for array in train_set), held_out

    curves = {}

    def show(name, curve):
        curves[name] = curve
        print(f"{name}: loss {curve.losses[-1]:.3f} after {curve.updates[-1]} updates", flush=True)

    show("batches of 16", train(data, args.epochs)[0])
    adaptive = AdaptiveAccumulation(max_steps=16, interval=10, smoothing=0.95)
    curve, noise = train(data, args.epochs, more=[adaptive])
    show("AdaptiveAccumulation", curve)
    show("batches of 128", train(data, args.epochs, batches=8)[0])

    for record in adaptive.records:
        print(
            f"AdaptiveAccumulation, update {record.update}: noise scale {record.noise_scale:.0f}, "
            f"now {record.accumulation_steps} batches of 16, rate {record.learning_rate:.3f}"
        )
    draw(curves, noise, args.picture)
    print(f"picture: {args.picture}")


if __name__ == "__main__":
    main()
