"""mindyolo's step on two ranks, compared with the joined batches on one process. Its losses are sums, and it takes a
number of ranks and a reducer. Its package is not needed, because the adapter takes only its arguments.
"""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import nn

from tests.ranks.adopted_worker import MAX_NORM, SAMPLES, data, momentum
from tests.support.adopted import BatchTimesLoss, K, Predictor, joined
from tests.support.by_hand import ByHand, global_norm, norm_of, train_whole
from tests.support.reference import relative_error
from tests.support.two_ranks import case, results_of

pytestmark = pytest.mark.distributed


ranks = results_of("adopted_worker")


class Whole(nn.Cell):
    def __init__(self):
        super().__init__()
        self.network, self.loss = Predictor(), BatchTimesLoss()

    def construct(self, x, y):
        return self.loss(self.network(x), y, x)[0]


def test_two_ranks_train_as_one_process(ranks):
    batches = [one for pair in zip(data(0), data(1), strict=True) for one in pair]
    windows, network, norms = joined(batches, 2 * K), Whole(), []
    assert {len(x) for x, _ in windows} == {2 * K * SAMPLES}

    def note(gradients, _):
        norms.append(norm_of(gradients))
        return gradients

    rows = train_whole(network, ByHand(momentum(network), [note, global_norm(MAX_NORM)]), windows)
    assert norms[0] > MAX_NORM > norms[1], norms  # a wrong factor shows only where nothing is clipped
    both = [case(one, "mindyolo") for one in ranks]
    for one in both:
        assert one["updates"] == 2
        assert max(map(relative_error, one["weights"], rows)) < 1e-5
    np.testing.assert_array_equal(both[0]["weights"], both[1]["weights"])
