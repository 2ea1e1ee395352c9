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

PICTURE = Path(__file__).with_name("pictures") / "front.svg"
UPDATES, BATCH = 30, 1024
SIZES = (1, 2, 4, 8, 16)  # numbers of micro-batches
WIDTH, HEIGHT = 480, 260


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


def draw(losses: dict[int, list[float]], growth: dict[int, float]) -> str:
    """Two charts beside each other: both curves, and the memory."""
    from gaccum_ms.report.chart import STYLE, Axis, Series, line_chart

    whole, parts = ([(float(n), loss) for n, loss in enumerate(losses[size], start=1)] for size in (1, 16))
    curves = line_chart(
        [Series("whole batch", whole), Series("16 micro-batches", parts, 1, "dots")],
        Axis("update"),
        Axis("loss", zero=True),
        "Loss over 30 updates: the dots of 16 micro-batches lie on the whole batch's curve",
    )
    memory = line_chart(
        [Series("", [(float(size), mb) for size, mb in growth.items()], 1, "both")],
        Axis("micro-batches", log=True, ticks=SIZES),
        Axis("memory of training, MB", zero=True),
        f"Growth of the process: {growth[1]:.0f} MB with the whole batch, {growth[16]:.0f} MB with 16 micro-batches",
    )
    places = [
        chart.replace("<svg ", f'<svg x="{x}" width="{WIDTH}" height="{HEIGHT}" ', 1)
        for x, chart in ((0, curves), (WIDTH, memory))
    ]
    size = f'width="{2 * WIDTH}" height="{HEIGHT}" viewBox="0 0 {2 * WIDTH} {HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>\n{STYLE}</style>'
    return "\n".join([head, *places, "</svg>\n"])


def main() -> None:
    losses, growth = {}, {}
    for size in SIZES:
        said = subprocess.run([sys.executable, __file__, str(size)], stdout=subprocess.PIPE, check=True)
        losses[size], growth[size] = json.loads(said.stdout.splitlines()[-1])
        print(f"{size} micro-batches: loss {losses[size][0]:.4f} to {losses[size][-1]:.4f}, {growth[size]:.0f} MB")
    PICTURE.write_text(draw(losses, growth))


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(train(int(sys.argv[1]))))
    else:
        main()
