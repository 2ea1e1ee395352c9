"""mindyolo's step on two ranks, compared with the joined batches on one process. Its losses are sums, and it takes a
number of ranks and a reducer. Its package is not needed, because the adapter takes only its arguments.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.communication import get_group_size, get_rank

from gaccum_ms.adopt import mindyolo
from tests.ranks.cases import named, set_up
from tests.support.adopted import BatchTimesLoss, K, Predictor, few_batches, joined
from tests.support.by_hand import ByHand, global_norm, norm_of, train_whole
from tests.support.reference import as_numpy, relative_error, vector
from tests.support.two_ranks import Results, case, results_of

pytestmark = pytest.mark.distributed
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
        *("detect", network, BatchTimesLoss(), momentum(network), float(get_group_size()), 1.0),
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
ranks = results_of("test_adopted_ranks")


class Whole(nn.Cell):
    def __init__(self):
        super().__init__()
        self.network, self.loss = Predictor(), BatchTimesLoss()

    def construct(self, x, y):
        return self.loss(self.network(x), y, x)[0]


def test_two_ranks_train_as_one_process(ranks):
    batches = [one for pair in zip(data(0), data(1), strict=True) for one in pair]
    network, norms = Whole(), []

    def note(gradients, _):
        norms.append(norm_of(gradients))
        return gradients

    optimizer = ByHand(momentum(network), [note, global_norm(MAX_NORM)])
    rows = train_whole(network, optimizer, joined(batches, 2 * K))
    assert norms[0] > MAX_NORM > norms[1], norms  # a wrong factor shows only where nothing is clipped
    both = [case(one, "mindyolo") for one in ranks]
    for one in both:
        assert one["updates"] == 2
        assert max(map(relative_error, one["weights"], rows)) < 1e-5
    np.testing.assert_array_equal(both[0]["weights"], both[1]["weights"])
