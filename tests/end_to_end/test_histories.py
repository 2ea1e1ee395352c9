"""A few of the random histories of tests/histories.py, and faults that they find."""

from __future__ import annotations

import pytest
from mindspore import ops

from gaccum_ms import TrainOneStepWithGradAccumulationCell
from tests import histories
from tests.support.ranks import Ranks

pytestmark = pytest.mark.filterwarnings("ignore:For '(GradAccumulationCell|GradAccumulator|Train)")


@pytest.mark.core(seed=0)
@pytest.mark.parametrize("seed", range(8))
def test_histories_of_the_eager_step(seed):
    assert not histories.play(seed)


@pytest.mark.thorough
def test_a_history_of_the_compiled_step():
    assert not histories.play(16, "graph", calls=8)


class AddsTwice(TrainOneStepWithGradAccumulationCell):
    def _make_window(self):
        window = super()._make_window()
        if hasattr(window.store, "add"):  # a window of one micro-batch adds nothing
            add = window.store.add
            window.store.add = lambda gradients: add(gradients) and add(gradients)
        return window


class KeepsTheLast(TrainOneStepWithGradAccumulationCell):
    def _make_window(self):
        window = super()._make_window()
        if hasattr(window.store, "add"):
            store = window.store
            store.add = lambda gradients: store.map(ops.assign, store.sums, gradients)
        return window


@pytest.mark.parametrize("step_class", [AddsTwice, pytest.param(KeepsTheLast, marks=pytest.mark.thorough)])
def test_a_step_that_is_broken_on_purpose_is_found(step_class):
    reports = (histories.play(seed, step_class=step_class) for seed in range(4))
    report = next(filter(None, reports), "")
    assert "expected" in report and "train" in report


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_history_on_two_ranks(tmp_path, rank_pair):
    with Ranks(tmp_path, 1) as alone:
        assert not histories.tell(0, "pynative", 2, {1: alone, 2: rank_pair}, tmp_path)
