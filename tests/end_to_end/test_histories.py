"""Two of the random histories of tests/histories.py."""

from __future__ import annotations

import pytest

from tests import histories

pytestmark = pytest.mark.filterwarnings("ignore:For '(GradAccumulationCell|GradAccumulator|Train)")


def test_a_history_of_the_eager_step():
    assert not histories.play(0)


def test_a_history_of_the_compiled_step():
    assert not histories.play(16, "graph", calls=8)
