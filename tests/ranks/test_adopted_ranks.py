"""The adapters' steps on two ranks, compared with the joined batches on one process.

tests/adopt/ compares each adapter with its package's own step. Here no package is needed, because the adapters take
only the arguments of their package.
"""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import nn

from tests.ranks.adopted_worker import MAX_NORM, MAX_NORM_OF_SUM, SAMPLES, STEPS, data, momentum
from tests.support.adopted import BatchTimesLoss, K, Predictor, joined
from tests.support.by_hand import ByHand, global_norm, norm_of, train_whole
from tests.support.reference import Regression, relative_error
from tests.support.two_ranks import case, results_of

pytestmark = pytest.mark.distributed


ranks = results_of("adopted_worker")


class WholeBatchOfMindyolo(nn.Cell):
    def __init__(self):
        super().__init__()
        self.network, self.loss = Predictor(), BatchTimesLoss()

    def construct(self, x, y):
        return self.loss(self.network(x), y, x)[0]


def whole(network, max_norm):
    """The weights after each window, of one process on the batches of both ranks."""
    batches = [one for pair in zip(data(0), data(1), strict=True) for one in pair]
    windows = joined(batches, 2 * K)
    assert {len(x) for x, _ in windows} == {2 * K * SAMPLES}
    norms = []

    def note(gradients, _):
        norms.append(norm_of(gradients))
        return gradients

    rows = train_whole(network, ByHand(momentum(network), [note, global_norm(max_norm)]), windows)
    assert norms[0] > max_norm > norms[1], norms  # a wrong factor shows only where nothing is clipped
    return rows


@pytest.mark.parametrize("name", STEPS)
def test_two_ranks_train_as_one_process(ranks, name):
    network, norm = (WholeBatchOfMindyolo, MAX_NORM_OF_SUM) if name == "mindyolo" else (Regression, MAX_NORM)
    rows = whole(network(), norm)
    both = [case(one, name) for one in ranks]
    for one in both:
        assert one["updates"] == 2
        assert max(map(relative_error, one["weights"], rows)) < 1e-5
    np.testing.assert_array_equal(both[0]["weights"], both[1]["weights"])
