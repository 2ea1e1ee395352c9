"""Draws `pictures/front.svg`, the picture of the README and of the front page: ``python docs/front_picture.py`` .

A network of dense layers learns scikit-learn's handwritten digits, 1,024 in a batch. Each number of micro-batches is
trained in a process of its own, from the same weights and on the same batches; the process reports its losses and how
far it grew.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gaccum_ms.report.plots import ORANGE, Line, panels, plot, svg  # noqa: E402

PICTURE = Path(__file__).with_name("pictures") / "front.svg"
UPDATES, BATCH = 30, 1024
SIZES = (1, 2, 4, 8, 16)  # numbers of micro-batches


def train(micro_size: int) -> tuple[list[float], float]:
    """The loss of each update, and by how many MB the process grew."""
    import mindspore as ms
    import numpy as np
    from mindspore import nn
    from sklearn.datasets import load_digits

    from gaccum_ms import GradAccumulationCell, TrainOneStepWithGradAccumulationCell

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    hidden = [layer for _ in range(32) for layer in (nn.LayerNorm([2048]), nn.Tanh())]
    net = nn.SequentialCell(nn.Dense(64, 2048), *hidden, nn.Dense(2048, 10))
    cell = GradAccumulationCell(nn.WithLossCell(net, nn.CrossEntropyLoss()), micro_size)
    step = TrainOneStepWithGradAccumulationCell(cell, nn.Momentum(net.trainable_params(), 0.003, 0.9)).set_train()
    before, losses, random = _peak_mb(), [], np.random.default_rng(1)
    for _ in range(UPDATES):
        rows = random.choice(len(images), BATCH, replace=False)
        losses.append(float(step(ms.Tensor(images[rows]), ms.Tensor(labels[rows]))))
    return losses, _peak_mb() - before


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def draw(losses: dict[int, list[float]], growth: dict[int, float]) -> None:
    """Both curves, and the memory."""
    figure, (curves, memory) = panels(2, 10, 3.2)
    updates = range(1, UPDATES + 1)
    whole = Line(updates, losses[1], label="whole batch")
    parts = Line(updates, losses[16], ORANGE, "16 micro-batches", marker="o", style="none")
    plot(curves, [whole, parts], zero=True)
    curves.set(title="The loss: the same, update for update", xlabel="update", ylabel="loss")
    curves.legend()
    plot(memory, [Line(list(growth), list(growth.values()), ORANGE, marker="o")], zero=True)
    memory.set(title="The memory: what fits is up to you", xlabel="micro-batches", ylabel="memory of training, MB")
    memory.set_xscale("log")
    memory.set_xticks(SIZES, map(str, SIZES))
    memory.minorticks_off()
    PICTURE.write_text(svg(figure))


def main() -> None:
    losses, growth = {}, {}
    for size in SIZES:
        said = subprocess.run([sys.executable, __file__, str(size)], stdout=subprocess.PIPE, check=True)
        losses[size], growth[size] = json.loads(said.stdout.splitlines()[-1])
        print(f"{size} micro-batches: loss {losses[size][0]:.4f} to {losses[size][-1]:.4f}, {growth[size]:.0f} MB")
    draw(losses, growth)


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(train(int(sys.argv[1]))))
    else:
        main()
