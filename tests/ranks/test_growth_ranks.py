"""The memory of two ranks is flat, as that of one: test_memory_growth.py."""

from __future__ import annotations

import pytest

from tests.ranks.growth_worker import WAYS
from tests.support.two_ranks import case, results_of
from tests.training.test_memory_growth import MOST, pytestmark

pytestmark = [pytestmark, pytest.mark.distributed, pytest.mark.thorough]

ranks = results_of("growth_worker")


@pytest.mark.parametrize("way", WAYS)
def test_memory_of_ranks_is_flat(ranks, way):
    assert max(float(case(rank, way)["growth"]) for rank in ranks) < MOST
