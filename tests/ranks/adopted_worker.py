"""The cases of test_adopted_ranks.py on ranks (support/ranks.py): the adapters' steps, each rank on its own batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import get_group_size, get_rank

from gaccum_ms.adopt import mindcv, mindocr, mindone, mindyolo
from tests.support.adopted import BatchTimesLoss, K, Predictor, few_batches
from tests.support.modes import MODES
from tests.support.reference import Regression, as_numpy, vector
from tests.support.two_ranks import Results

SAMPLES = 4  # on each rank, in each batch
MAX_NORM = 1.0  # between the norms of the two windows
MAX_NORM_OF_SUM = 2 * K * SAMPLES * MAX_NORM  # mindyolo's loss is multiplied by the number of samples


def momentum(network: nn.Cell) -> nn.Optimizer:
    return nn.Momentum(network.trainable_params(), 0.01, 0.9)


def step_of_mindyolo() -> nn.Cell:
    network = Predictor()
    return mindyolo.train_step(
        "detect",
        network,
        BatchTimesLoss(),
        momentum(network),
        float(get_group_size()),
        1.0,
        nn.DistributedGradReducer(network.trainable_params()),
        clip_grad=True,
        clip_grad_value=MAX_NORM_OF_SUM,
        accumulate=K,
        reduction="sum",
    )


def with_loss(train_step: Callable, **options) -> Callable[[], nn.Cell]:
    def make() -> nn.Cell:
        network = Regression()
        return train_step(network, momentum(network), gradient_accumulation_steps=K, **options)

    return make


MAKERS: dict[str, Callable[[], nn.Cell]] = {
    "mindcv": with_loss(mindcv.train_step, clip_grad=True, clip_value=MAX_NORM),
    "mindocr": with_loss(mindocr.train_step, clip_grad=True, clip_norm=MAX_NORM),
    "mindone": with_loss(mindone.train_step, clip_grad=True, clip_norm=MAX_NORM),
    "mindone's transformers": with_loss(mindone.transformers_train_step, clip_grad="norm", clip_value=MAX_NORM),
    "mindyolo": step_of_mindyolo,
}


def data(rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Two windows; the targets of the second are near 0, and its gradients small."""
    batches = few_batches(2 * K, SAMPLES, seed=50 + rank)
    return [(x, y if number < K else y * 1e-3) for number, (x, y) in enumerate(batches)]


def train(name: str, mode: str) -> Results:
    ms.set_context(mode=MODES[mode])
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    step = MAKERS[name]().set_train()
    rows = []
    for number, batch in enumerate(data(get_rank()), start=1):
        step(*map(Tensor, batch))
        if number % K == 0:
            rows.append(vector(step.weights))
    return {f"{name}, {mode}/weights": np.stack(rows), f"{name}, {mode}/updates": as_numpy(step.update_count)}


def _case(name: str, mode: str) -> Callable[[Path], Results]:
    return lambda out: train(name, mode)


CASES = {f"{name}, {mode}": _case(name, mode) for name in MAKERS for mode in MODES}
