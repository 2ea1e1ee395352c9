"""Reads the results of workers on two ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.ranks import Asked

Results = dict[str, np.ndarray]


def results_of(worker: str) -> Any:
    """For a test module: a fixture of each rank's results of a worker in tests/ranks, by case."""
    import pytest  # not above: ranks import this file too

    @pytest.fixture(scope="module")
    def results(rank_pair, tmp_path_factory) -> list[Results]:
        return rank_pair.worker(f"tests.ranks.{worker}", tmp_path_factory.mktemp(worker))

    return results


def case(results: Results, name: str) -> Results:
    """The arrays whose names begin with ``name/`` ."""
    if isinstance(results, Asked):
        results.ask(name)
    found = {key.removeprefix(name + "/"): value for key, value in results.items() if key.startswith(name + "/")}
    assert found, name
    return found
