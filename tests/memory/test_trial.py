"""What a trial trains, and which bytes are known that it does not need."""

from __future__ import annotations

from mindspore import Tensor, nn

from gaccum_ms import GradAccumulationCell
from gaccum_ms.memory import trial
from gaccum_ms.memory.trial import Trials, even_sizes
from gaccum_ms.training.step import step_on_trial
from tests.support.reference import OPTIMIZERS, batches, make_network, make_step
from tests.support.state import assert_identical, everything


def test_even_sizes():
    """100 samples in ten or eleven micro-batches: at most 10 in each; in nine 12, eight 13, seven 15, six 17."""
    assert even_sizes(100) == [*range(1, 11), 12, 13, 15, 17, 20, 25, 34, 50, 100]


def test_a_trial_updates_nothing_and_adds_the_state_that_is_not_written_yet(monkeypatch, pynative):
    """Adam has two moments; its step, its rate and two powers of beta are numbers, of which the step is zero. The trial
    runs in this process, and its own memory is nothing."""
    monkeypatch.setattr(trial, "run_in_child", lambda owner, limit, run: run() or (0, 0))
    network = nn.WithLossCell(make_network("dense"), nn.CrossEntropyLoss())
    optimizer = OPTIMIZERS["adam"](network.trainable_params())
    batch = [Tensor(value) for value in batches(8, 1)[0]]
    trials = Trials("test", GradAccumulationCell(network, 2), optimizer, batch, step_on_trial, 1 << 40)
    before = everything(optimizer)
    moments = 2 * sum(weight.nbytes for weight in optimizer.parameters)
    assert trials.run(2) == (moments + 4, 0)
    assert_identical(everything(optimizer), before)
    make_step(network, lambda weights: optimizer, micro_size=2)(*batch)
    trials = Trials("test", GradAccumulationCell(network, 2), optimizer, batch, step_on_trial, 1 << 40)
    assert trials.run(2) == (0, 0)
