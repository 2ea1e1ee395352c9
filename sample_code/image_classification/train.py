"""Trains a mindcv network on handwritten digits, with our step for the arguments of mindcv's `TrainStep` .

    bash run.sh                        55 seconds on two cores

Four batches share an update. The weights and their average are evaluated after each epoch.
"""

import argparse
import warnings

import mindcv
import mindspore as ms
import numpy as np
from matplotlib.figure import Figure
from mindspore import nn
from sklearn.datasets import load_digits

from gaccum_ms import ProgressBar, WeightAverage, tune_cpu
from gaccum_ms.adopt.mindcv import train_step


def digits():
    """scikit-learn's 1,797 digits, 8×8 pixels, enlarged to 32×32: training images and labels, and held-out ones."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = np.kron(data.images[order], np.ones((4, 4)))[:, None].astype(np.float32) / 8 - 1
    labels = data.target[order].astype(np.int32)
    return (images[:1437], labels[:1437]), (images[1437:], labels[1437:])


class Evaluation(ms.Callback):
    """Records after each epoch the accuracy with the weights and with their averages."""

    def __init__(self, network, images, labels):
        super().__init__()
        self.network = network
        self.images, self.labels = ms.Tensor(images), labels
        self.weights, self.averages = [], []

    def guesses(self):
        self.network.set_train(False)
        logits = self.network(self.images).asnumpy()
        self.network.set_train(True)
        return logits.argmax(1)

    def accuracy(self):
        return float((self.guesses() == self.labels).mean())

    def on_train_epoch_end(self, run_context):
        parameters = run_context.original_args()
        self.weights.append(self.accuracy())
        with parameters.train_network.averaged_weights():
            self.averages.append(self.accuracy())
        accuracies = f"accuracy {self.weights[-1]:.2%}, of the averages {self.averages[-1]:.2%}"
        print(f"epoch {parameters.cur_epoch_num}: {accuracies}", flush=True)


def draw(evaluation, held_out, guesses, path):
    """Draw the accuracies over epochs, and the first held-out digits with the network's predictions."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    epochs = range(1, len(evaluation.weights) + 1)
    left.plot(epochs, evaluation.weights, "o--", label="weights")
    left.plot(epochs, evaluation.averages, "o-", label="their averages")
    left.set(xlabel="epochs", ylabel="accuracy on held-out digits")
    left.legend()
    images, labels = held_out
    tiles = np.pad(images[:24, 0, ::4, ::4], ((0, 0), (1, 1), (6, 1)), constant_values=-1)  # room for the prediction
    right.imshow(np.vstack([np.hstack(tiles[start : start + 8]) for start in range(0, 24, 8)]), cmap="gray_r")
    for place, (guess, label) in enumerate(zip(guesses[:24], labels[:24], strict=True)):
        color = "tab:green" if guess == label else "tab:red"
        corner = place % 8 * 15 + 3, place // 8 * 10 + 5
        right.text(*corner, str(guess), color=color, fontweight="bold", ha="center", va="center")
    right.set(xticks=[], yticks=[], title="what the averages take them for")
    figure.savefig(path, dpi=80)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--network", default="shufflenet_v2_x0_5", help="a network of mindcv for small images")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="samples in memory at once")
    parser.add_argument("--accumulation-steps", type=int, default=4, help="batches that share an update")
    parser.add_argument("--samples", type=int, help="number of training samples, by default all")
    parser.add_argument("--picture", default="image_classification.png")
    args = parser.parse_args()

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    tune_cpu()
    train, held_out = digits()
    train = [array[: args.samples] for array in train]
    data_set = ms.dataset.NumpySlicesDataset(tuple(train), shuffle=True).batch(args.batch_size)

    network = mindcv.create_model(args.network, num_classes=10, in_channels=1)
    # BatchNorm normalises each batch, as in mindcv's step, and not the four batches of an update together.
    warnings.filterwarnings("ignore", "For 'GradAccumulationCell', the network has .* BatchNorm")
    step = train_step(  # the arguments of mindcv's own TrainStep
        nn.WithLossCell(network, nn.CrossEntropyLoss()),
        nn.Adam(network.trainable_params(), 0.003),
        clip_grad=True,
        clip_value=5.0,
        gradient_accumulation_steps=args.accumulation_steps,
        # Instead of ema=True: mindcv's average needs 2,000 updates to warm up, and this training makes about 100.
        transforms=(WeightAverage(0.9, warmup=True, buffers=True),),
    )
    evaluation = Evaluation(network, *held_out)
    ms.Model(step).train(args.epochs, data_set, callbacks=[evaluation, ProgressBar()], dataset_sink_mode=False)

    with step.averaged_weights():
        guesses = evaluation.guesses()
    draw(evaluation, held_out, guesses, args.picture)
    print(f"{int(step.update_count.asnumpy())} updates; picture: {args.picture}")


if __name__ == "__main__":
    main()
