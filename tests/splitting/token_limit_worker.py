"""Trains by length with a limit of BYTES above the process's memory, ``OUT auto BYTES`` , or with a number of tokens,
``OUT alone TOKENS`` . Run by tests/splitting/test_auto_tokens.py."""

from __future__ import annotations

import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from memory_limit_worker import Watch
from mindspore import Tensor, nn
from support.two_ranks import leave

from gaccum_ms import AutoSize, CountNotIgnored, GradAccumulationCell, MaxTokens, TrainOneStepWithGradAccumulationCell
from gaccum_ms.memory.heap import keep_heap_small
from gaccum_ms.memory.proc import forget_peak, own

TEXTS, WIDTHS, CLASSES, IGNORED = 64, (64, 256), 5, -100


class Tagger(nn.Cell):
    """Some 50 KB of intermediate values for each token."""

    def __init__(self):
        super().__init__()
        self.layers = nn.SequentialCell(nn.Dense(4, 4000), nn.Tanh(), nn.Dense(4000, CLASSES))
        self.loss = nn.CrossEntropyLoss(ignore_index=IGNORED)

    def construct(self, x, y):
        return self.loss(self.layers(x).reshape((-1, CLASSES)), y.reshape((-1,)))


def main(out: Path, way: str, number: int) -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, WIDTHS[-1] + 1, TEXTS)
    y = rng.integers(0, CLASSES, (TEXTS, WIDTHS[-1])).astype(np.int32)
    y[np.arange(WIDTHS[-1]) >= lengths[:, None]] = IGNORED
    batch = [Tensor(rng.normal(size=(*y.shape, 4)).astype(np.float32)), Tensor(y)]
    network = Tagger()
    optimizer = nn.Adam(network.trainable_params())
    keep_heap_small()
    forget_peak()
    before = own("VmRSS")
    results = {"before": before}
    if way == "auto":
        results["limit"] = before + number
    split = MaxTokens(
        AutoSize(before + number) if way == "auto" else number,
        length=lambda x, y: (y.asnumpy() != IGNORED).sum(1),
        widths=WIDTHS,
        padding=(0, IGNORED),
    )
    watch = Watch()
    cell = GradAccumulationCell(network, split=split, count=CountNotIgnored(IGNORED))
    step = TrainOneStepWithGradAccumulationCell(cell, optimizer).set_train()
    for _ in range(2):
        step(*batch).asnumpy()
    results |= {"tokens": split.max_tokens, "with_trials": watch.most, "peak": own("VmHWM")}
    leave(out, 0, {name: np.array(value) for name, value in results.items()})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
