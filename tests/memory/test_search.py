"""find_micro_batch_size: the largest size that fits, by a limit and by running out of memory; restored state; ranks."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from gaccum_ms import (
    AutoSize,
    ClipByValue,
    GradAccumulationCell,
    find_micro_batch_size,
)
from gaccum_ms.memory.heap import keep_heap_small
from gaccum_ms.memory.meter import AllocatorMeter
from gaccum_ms.memory.proc import forget_peak, own
from gaccum_ms.memory.trial import even_sizes
from tests.support.alone import alone
from tests.support.reference import OPTIMIZERS, as_numpy, batches, make_network, make_step
from tests.support.two_ranks import case

PLENTY = 1 << 40


class Limited(nn.Cell):
    """A network with its loss that raises MindSpore's out-of-memory error above `largest` samples."""

    def __init__(self, network, largest, words="std::bad_alloc"):
        super().__init__()
        self.network = network
        self.loss = nn.CrossEntropyLoss()
        self.largest = largest
        self.words = words

    def construct(self, x, y):
        if x.shape[0] > self.largest:
            raise RuntimeError(self.words)
        return self.loss(self.network(x), y)


def batch(samples):
    return [Tensor(value) for value in batches(samples, 1)[0]]


def search(network, samples=32, options=None, **arguments):
    optimizer = OPTIMIZERS["momentum"](network.trainable_params())
    arguments = {"memory_limit": PLENTY, **arguments}
    cell = GradAccumulationCell(network, 1, **(options or {}))
    return find_micro_batch_size(cell, optimizer, batch(samples), **arguments)


@pytest.fixture
def tried(monkeypatch) -> list[tuple[int, int]]:
    """For each trial, in order: the samples of a micro-batch and of the batch."""
    from gaccum_ms.memory.trial import Trials

    sizes: list[tuple[int, int]] = []
    run = Trials.run
    monkeypatch.setattr(Trials, "run", lambda self, *size: sizes.append(size) or run(self, *size))
    return sizes


OF_100 = [*range(1, 11), 12, 13, 15, 17, 20, 25, 34, 50, 100]


@pytest.mark.parametrize(("samples", "expected"), [(1, [1]), (2, [1, 2]), (10, [1, 2, 3, 4, 5, 10]), (100, OF_100)])
def test_even_sizes(samples, expected):
    """100 samples in ten or eleven micro-batches: at most 10 in each; in nine 12, eight 13, seven 15, six 17."""
    assert even_sizes(samples) == expected


@pytest.mark.device("find_micro_batch_size finds the largest size that fits", ran="an H100, 2026-11-27")
def test_finds_the_largest_that_is_not_out_of_memory(tried, pynative):
    assert search(Limited(make_network("dense"), 8), samples=16) == 8
    assert len(tried) <= 2 + 1 + 3 + 2  # a line, the whole batch, a bisection of seven sizes, a line for the whole
    assert len(set(tried)) == len(tried)


class Pictures(nn.Cell):
    """Some 130 KB of intermediate values for each sample."""

    def __init__(self):
        super().__init__()
        self.layers = nn.SequentialCell(nn.Dense(12, 12_000), nn.Tanh(), nn.Dense(12_000, 5))

    def construct(self, x):
        return self.layers(x)


def trained(size: int | None, room: int = 0) -> tuple[int, int]:
    """In a new process: the size of a training, and its peak above the memory before it. Without a size, it finds one,
    with so many bytes more than the process has."""
    ms.set_context(mode=ms.GRAPH_MODE)
    network = nn.WithLossCell(Pictures(), nn.CrossEntropyLoss())
    data = batch(1024)
    keep_heap_small()
    forget_peak()
    before = own("VmRSS")
    step = make_step(network, nn.Adam, micro_batch_size=size or AutoSize(memory_limit=before + room))
    for _ in range(3):
        step(*data).asnumpy()
    return step.micro_batch_size, own("VmHWM") - before


@pytest.mark.idle
@pytest.mark.thorough
def test_what_is_found_fits():
    """Training keeps the limit; with twice the samples it would not. benchmarks/memory_limit.py watches the search."""
    room = 230_000_000
    size, peak = alone(trained, None, room)
    assert 1 < size < 1024
    assert peak <= room
    assert alone(trained, 2 * size)[1] > room


def test_not_even_one_sample(pynative):
    with pytest.raises(RuntimeError, match=r"one sample must fit, but got memory_limit=1000000, .*on rank\(s\) \[0\]"):
        search(make_with_loss(), memory_limit=1_000_000)
    with pytest.raises(RuntimeError, match=r"one sample must fit, .* on rank\(s\) \[0\]"):
        search(Limited(make_network("dense"), 0))


def make_with_loss():
    return nn.WithLossCell(make_network("dense"), nn.CrossEntropyLoss())


# -- what counts as out of memory --------------------------------------------------------------------------------------


def test_other_errors_are_raised(pynative):
    with pytest.raises(RuntimeError, match="a bug in the network"):
        search(Limited(make_network("dense"), 0, "a bug in the network"))


@pytest.mark.thorough
def test_the_test_is_injectable(pynative):
    network = Limited(make_network("dense"), 2, "the device says: enough")
    assert search(network, samples=3, is_out_of_memory=lambda error: "enough" in str(error)) == 2
    with pytest.raises(TypeError, match=r"'is_out_of_memory' must be a function of an error, but got 3"):
        search(network, is_out_of_memory=3)


@pytest.mark.parametrize("batch", [ms.Tensor(np.ones((4, 3), np.float32)), None], ids=["Tensor", "NoneType"])
def test_a_batch_that_is_no_tuple_is_refused(batch):
    cell = GradAccumulationCell(nn.Dense(3, 1), 2)
    with pytest.raises(TypeError) as error:
        find_micro_batch_size(cell, nn.SGD(cell.trainable_params(), 0.1), batch)
    assert str(error.value) == (
        "For 'find_micro_batch_size', the argument 'batch' must be a tuple or list of Tensors, but got a "
        f"'{type(batch).__name__}'. Pass a network's only input as (batch,)."
    )


# -- what is put back --------------------------------------------------------------------------------------------------


class Forgetful(nn.Cell):
    """A network with state besides weights, BatchNorm's statistics, and with random numbers, dropout's."""

    def __init__(self):
        super().__init__()
        self.layers = nn.SequentialCell(nn.Dense(12, 8), nn.BatchNorm1d(8), nn.Dropout(p=0.5), nn.Dense(8, 5))

    def construct(self, x):
        return self.layers(x)


def assert_nothing_changes(ask):
    """``ask(cell, optimizer, batch)`` is called in the middle of a window."""
    network = Limited(Forgetful(), 2)
    step = make_step(network, OPTIMIZERS["momentum"], micro_batch_size=2, accumulation_steps=2)
    with pytest.warns(UserWarning, match="BatchNorm"):
        for _ in range(3):
            step(*batch(4))
    parameters = list(step.get_parameters())
    before = {parameter.name: as_numpy(parameter) for parameter in parameters}
    generator = ms.get_rng_state().asnumpy()
    flags = [(one.training, one.requires_grad) for _, one in network.cells_and_names()]
    ask(GradAccumulationCell(network, 1), step.optimizer, batch(4))
    for parameter in parameters:
        np.testing.assert_array_equal(as_numpy(parameter), before[parameter.name], err_msg=parameter.name)
    np.testing.assert_array_equal(ms.get_rng_state().asnumpy(), generator)
    assert [(one.training, one.requires_grad) for _, one in network.cells_and_names()] == flags


def search_and_compare():
    def ask(*arguments):
        assert find_micro_batch_size(*arguments, PLENTY) == 2

    assert_nothing_changes(ask)


def test_nothing_changes(pynative):
    search_and_compare()


@pytest.fixture
def here(monkeypatch):
    """Trials in this process, as on accelerators. On CPU, MindSpore's allocator reports no memory for any size."""
    monkeypatch.setattr("gaccum_ms.memory.meter.meter", AllocatorMeter)


def test_nothing_changes_where_trials_run_in_this_process(here, pynative):
    search_and_compare()


def test_statistics_change_where_they_are_not_put_back(here, monkeypatch, pynative):
    """The control."""
    monkeypatch.setattr("gaccum_ms.memory.trial.Snapshot.restore_values", lambda self: None)
    with pytest.raises(AssertionError, match=r"moving_|weight|bias"):
        search_and_compare()


# -- what is remembered ------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_is_found_once(tried, pynative):
    network = Limited(make_network("dense"), 2)
    assert search(network, samples=3) == 2
    number = len(tried)
    assert search(network, samples=3) == 2
    assert len(tried) == number
    search(network, samples=2)  # other shapes
    assert len(tried) > number
    number = len(tried)
    search(network, samples=2, memory_limit=PLENTY + 1)
    assert len(tried) > number
    number = len(tried)
    search(network, samples=2, options={"transforms": (ClipByValue(1.0),)})  # they need memory too
    assert len(tried) > number
    number = len(tried)
    assert search(Limited(make_network("dense"), 1), samples=2) == 1  # another network
    assert len(tried) > number


# -- ranks -------------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.distributed
def test_ranks_agree_on_the_smallest(rank_pair, tmp_path):
    """Rank 1 is out of memory above 6 samples: both ranks find 6, for 16 samples in three micro-batches. If nothing
    fits on rank 1, both ranks raise an error. Training goes on as with the number given, with unchanged weights."""
    for rank in rank_pair.worker("tests.ranks.find_size_ranks_worker", tmp_path):
        results = case(rank, "search")
        assert results["less on rank 1"] == 6
        assert "not enough on rank(s) [1]" in str(results["nothing on rank 1"])
        searched, given = case(results, "searched"), case(results, "given")
        for name in ("hidden.weight", "hidden.bias", "out.weight", "out.bias"):
            np.testing.assert_array_equal(searched[f"network.{name}"], given[name])
