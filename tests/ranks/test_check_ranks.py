"""The proof at the first batch on two ranks: each decides for itself, and none waits for the other."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.communication import get_rank

from tests.ranks.cases import named, set_up
from tests.support.reference import Regression, batches, make_step, vector
from tests.support.two_ranks import Results, case, results_of

pytestmark = pytest.mark.distributed


def texts_of(step, *batch) -> int:
    """How many warnings a call says."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(*map(Tensor, batch))
    return len(caught)


class Noisy(nn.Cell):
    """Only rank 1's loss is a sum."""

    def __init__(self):
        super().__init__()
        self.network, self.drop, self.factor = Regression(), nn.Dropout(p=0.5), get_rank()

    def construct(self, x, y):
        loss = self.network(self.drop(x), y)
        return loss * x.shape[0] if self.factor else loss


def train(out: Path) -> Results:
    set_up()
    step = make_step(Noisy(), micro_size=3, check="first_batch")
    texts = sum(texts_of(step, *batch) for batch in batches(9, 2, seed=20 + get_rank()))
    return named("trained", {"weights": vector(step.weights), "texts": texts})


def test_each_rank_decides_for_itself_and_they_stay_alike(ranks):
    both = [case(results, "trained") for results in ranks]
    assert [int(one["texts"]) for one in both] == [0, 1]
    np.testing.assert_array_equal(both[0]["weights"], both[1]["weights"])


def over_ranks(value):
    return ops.AllReduce()(value)


class WithCollective(Regression):
    def construct(self, x, y):
        return super().construct(x, y) * 9 + 0 * over_ranks(x.mean())


def collective(out: Path) -> Results:
    """Rank 1 leaves the proof out: it would wait for ever if rank 0 reached the collective."""
    set_up()
    step = make_step(WithCollective(), micro_size=3, check=None if get_rank() else "first_batch")
    texts = texts_of(step, *batches(9, 1)[0])
    return named("collective", {"told": [texts, "skipped: the loss has a collective" in str(step.run_record)]})


def test_a_loss_with_a_collective_is_left_out(ranks):
    assert [case(results, "collective")["told"].tolist() for results in ranks] == [[0, True], [0, False]]


CASES = {"trained": train, "collective": collective}
ranks = results_of("test_check_ranks")
