"""What a trial trains, and which bytes are known that it does not need."""

from __future__ import annotations

import pytest
from mindspore import Tensor, nn

from gaccum_ms import GradAccumulationCell
from gaccum_ms.memory.child import Usage
from gaccum_ms.memory.meter import AllocatorMeter, ProcessMeter
from gaccum_ms.memory.trial import Trials, even_sizes
from gaccum_ms.training.step import step_on_trial
from tests.support.reference import OPTIMIZERS, as_numpy, batches, make_network, make_step
from tests.support.state import assert_identical

OF_100 = [*range(1, 11), 12, 13, 15, 17, 20, 25, 34, 50, 100]


@pytest.mark.parametrize(("samples", "expected"), [(1, [1]), (100, OF_100)])
def test_even_sizes(samples, expected):
    """100 samples in ten or eleven micro-batches: at most 10 in each; in nine 12, eight 13, seven 15, six 17."""
    assert even_sizes(samples) == expected


@pytest.fixture
def here(monkeypatch):
    """A trial runs in this process, and its own memory is nothing."""
    monkeypatch.setattr(ProcessMeter, "usage", lambda self, owner, limit, run: run() or Usage(0, 0))


def trials(network, optimizer, samples=8) -> Trials:
    batch = [Tensor(value) for value in batches(samples, 1)[0]]
    return Trials("test", GradAccumulationCell(network, 2), optimizer, batch, step_on_trial, 1 << 40)


def test_a_trial_updates_nothing_and_adds_the_state_that_is_not_written_yet(here, pynative):
    """Adam has two moments; its step, its rate and two powers of beta are numbers, of which the step is zero."""
    network = nn.WithLossCell(make_network("dense"), nn.CrossEntropyLoss())
    optimizer = OPTIMIZERS["adam"](network.trainable_params())
    before = {parameter.name: as_numpy(parameter) for parameter in optimizer.get_parameters()}
    moments = 2 * sum(weight.nbytes for weight in optimizer.parameters)
    assert trials(network, optimizer).run(2) == (moments + 4, moments + 4, 0)
    assert_identical({parameter.name: as_numpy(parameter) for parameter in optimizer.get_parameters()}, before)
    step = make_step(network, lambda weights: optimizer, micro_size=2)
    step(*trials(network, optimizer)._batch)
    assert trials(network, optimizer).run(2) == (0, 0, 0)


def test_on_an_accelerator_a_trial_updates(monkeypatch):
    """So nothing is known without it."""
    monkeypatch.setattr("gaccum_ms.memory.meter.meter", AllocatorMeter)
    network = nn.WithLossCell(make_network("dense"), nn.CrossEntropyLoss())
    assert trials(network, OPTIMIZERS["adam"](network.trainable_params()))._known == 0


def test_the_first_micro_batches_stand_for_all():
    network = nn.WithLossCell(make_network("dense"), nn.CrossEntropyLoss())
    tried = trials(network, OPTIMIZERS["sgd"](network.trainable_params()), samples=23)
    shapes = [[value.shape[0] for value in tried._first(size, 1)] for size in (1, 3, 5, 23)]
    assert shapes == [[2, 2], [6 + 2, 6 + 2], [23, 23], [23, 23]]
