"""The case of test_adopted_ranks.py on ranks (support/ranks.py): mindyolo's step, each rank on its own batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import get_group_size, get_rank

from gaccum_ms.adopt import mindyolo
from tests.ranks.cases import named, set_up
from tests.support.adopted import BatchTimesLoss, K, Predictor, few_batches
from tests.support.reference import as_numpy, vector
from tests.support.two_ranks import Results

SAMPLES = 4  # on each rank, in each batch
MAX_NORM = 24.0  # between the norms of the two windows


def momentum(network: nn.Cell) -> nn.Optimizer:
    return nn.Momentum(network.trainable_params(), 0.01, 0.9)


def data(rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Two windows; the targets of the second are near 0, and its gradients small."""
    batches = few_batches(2 * K, SAMPLES, seed=50 + rank)
    return [(x, y if number < K else y * 1e-3) for number, (x, y) in enumerate(batches)]


def train(out: Path) -> Results:
    set_up()
    network, rows = Predictor(), []
    step = mindyolo.train_step(
        "detect",
        network,
        BatchTimesLoss(),
        momentum(network),
        float(get_group_size()),
        1.0,
        nn.DistributedGradReducer(network.trainable_params()),
        clip_grad=True,
        clip_grad_value=MAX_NORM,
        accumulate=K,
        reduction="sum",
    ).set_train()
    for number, batch in enumerate(data(get_rank()), start=1):
        step(*map(Tensor, batch))
        if number % K == 0:
            rows.append(vector(step.weights))
    return named("mindyolo", {"weights": rows, "updates": as_numpy(step.update_count)})


CASES = {"mindyolo": train}
