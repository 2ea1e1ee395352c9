"""Two of the random histories of tests/histories.py, and how one that differs is shrunk."""

from __future__ import annotations

import pytest

from tests import histories
from tests.support.history_oracle import Setup

pytestmark = pytest.mark.filterwarnings("ignore:For '(GradAccumulationCell|GradAccumulator|Train)")


def test_a_history_of_the_eager_step():
    assert not histories.play(0)


def test_a_history_of_the_compiled_step():
    assert not histories.play(16, "graph", calls=8)


def test_one_that_differs_is_shrunk_to_the_options_and_calls_that_it_needs():
    setup = Setup(steps=3, noise=True, transforms=(("norm", 0.5), ("half",)), optimizer="adam")

    def again(without):
        left, calls = setup.without(without), [call for call in ("0.0", "0.1", "0.2") if call not in without]
        if left.optimizer == "sgd":
            error = "ValueError"  # another one
        elif left.noise and left.link("half") and "0.1" in calls:
            error = "Difference"
        else:
            return ""
        return "\n".join([str(left), *(f"    {call} train [4]" for call in calls), f"rank 0: {error}: loss"])

    needed = ["transforms=(('half',),), noise=True, optimizer='adam'", "    0.1 train [4]", "rank 0: Difference: loss"]
    assert histories.shrunk(again([]), [], again).splitlines() == needed
