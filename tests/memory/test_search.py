"""find_micro_batch_size: the largest size that fits, by a limit and by running out of memory; restored state; ranks."""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from benchmarks.memory_limit import bytes_in, together
from gaccum_ms import GradAccumulationCell, find_micro_batch_size
from gaccum_ms.memory.trial import Trials, even_sizes
from tests.support.alone import alone
from tests.support.reference import OPTIMIZERS, batches, make_network, make_step
from tests.support.state import assert_identical, everything
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


def search(network, samples=32, **arguments):
    optimizer = OPTIMIZERS["momentum"](network.trainable_params())
    arguments = {"memory_limit": PLENTY, **arguments}
    return find_micro_batch_size(GradAccumulationCell(network, 1), optimizer, batch(samples), **arguments)


@pytest.mark.device("find_micro_batch_size finds the largest size that fits", ran="an H100, 2026-11-27")
def test_finds_the_largest_that_is_not_out_of_memory(monkeypatch, pynative):
    tried, run = [], Trials.run
    monkeypatch.setattr(Trials, "run", lambda self, size: tried.append(size) or run(self, size))
    assert search(Limited(make_network("dense"), 8), samples=16) == 8
    assert tried == [1, 2, 4, 8, 16]


def trained(size: int | None, room: int) -> tuple[int, int, int]:
    """In a new process: the size of a training, by how much it kept the limit at its peak, and the limit: so many bytes
    more than the process has. Without a size, it finds one."""
    ms.set_context(mode=ms.GRAPH_MODE)
    # Some 5 MB of intermediate values for each sample, and 27 MB of weights.
    wide = nn.SequentialCell(nn.Dense(12, 400_000), nn.Tanh(), nn.Dense(400_000, 5))
    network, data = nn.WithLossCell(wide, nn.CrossEntropyLoss()), batch(SAMPLES)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    limit = bytes_in("/proc/self/status", "VmRSS") + room
    optimizer = nn.Adam(network.trainable_params())
    if size is None:
        size = find_micro_batch_size(GradAccumulationCell(network, 1), optimizer, data, limit)
    step = make_step(network, lambda weights: optimizer, micro_batch_size=size)
    for _ in range(3):
        step(*data).asnumpy()
    return step.micro_batch_size, limit - bytes_in("/proc/self/status", "VmHWM"), limit


def watched(*arguments: Any) -> tuple[int, int, int, int]:
    """What `trained` returns, and the peak of its process together with the copies in which it searches."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        process = pool.submit(os.getpid).result()
        training = pool.submit(trained, *arguments)
        peak = 0
        while not training.done():
            peak = max(peak, together(process))
            time.sleep(0.01)
        return *training.result(), peak


SAMPLES = 96


@pytest.mark.parametrize("room", [400_000_000, 600_000_000])
def test_search_and_training_keep_the_limit_and_use_what_there_is(room):
    """No size that is so much larger that what was found is less than 85 % of it would fit."""
    size, left, limit, peak = watched(None, room)
    assert left >= 0
    assert peak <= 1.02 * limit
    larger = min(larger for larger in even_sizes(SAMPLES) if larger * 0.85 > size and SAMPLES % larger == 0)
    assert alone(trained, larger, room)[1] < 0


def test_not_even_one_sample(pynative):
    with pytest.raises(RuntimeError, match=r"one sample must fit, but got memory_limit=1000000, .*on rank\(s\) \[0\]"):
        search(nn.WithLossCell(make_network("dense"), nn.CrossEntropyLoss()), memory_limit=1_000_000)
    with pytest.raises(RuntimeError, match=r"one sample must fit, .* on rank\(s\) \[0\]"):
        search(Limited(make_network("dense"), 0))


def test_other_errors_are_raised_and_what_is_out_of_memory_is_injectable(pynative):
    with pytest.raises(RuntimeError, match="a bug in the network"):
        search(Limited(make_network("dense"), 0, "a bug in the network"))
    network = Limited(make_network("dense"), 2, "the device says: enough")
    assert search(network, samples=3, is_out_of_memory=lambda error: "enough" in str(error)) == 2
    with pytest.raises(TypeError, match=r"'is_out_of_memory' must be a function of an error, but got 3"):
        search(network, is_out_of_memory=3)


def test_a_batch_that_is_no_tuple_is_refused():
    cell = GradAccumulationCell(nn.Dense(3, 1), 2)
    words = (
        r"'batch' must be a tuple or list of Tensors, but got a 'Tensor'\. Pass a network's only input as \(batch,\)\."
    )
    with pytest.raises(TypeError, match=f"^For 'find_micro_batch_size', the argument {words}$"):
        find_micro_batch_size(cell, nn.SGD(cell.trainable_params(), 0.1), Tensor(np.ones((4, 3), np.float32)))


def test_nothing_changes_where_trials_run_in_this_process(monkeypatch, pynative):
    """As on accelerators; on CPU, MindSpore's allocator reports no memory for any size. A window is open."""
    monkeypatch.setattr("gaccum_ms.memory.trial.on_cpu", lambda: False)
    layers = nn.Dense(12, 8), nn.BatchNorm1d(8), nn.Dropout(p=0.5), nn.Dense(8, 5)  # with state, and random numbers
    network = Limited(nn.SequentialCell(*layers), 2)
    step = make_step(network, OPTIMIZERS["momentum"], micro_batch_size=2, accumulation_steps=2)
    with pytest.warns(UserWarning, match="BatchNorm"):
        for _ in range(3):
            step(*batch(4))
    before = everything(step)
    generator = ms.get_rng_state().asnumpy()
    flags = [(one.training, one.requires_grad) for _, one in network.cells_and_names()]
    assert find_micro_batch_size(GradAccumulationCell(network, 1), step.optimizer, batch(4), PLENTY) == 2
    assert_identical(everything(step), before)
    np.testing.assert_array_equal(ms.get_rng_state().asnumpy(), generator)
    assert [(one.training, one.requires_grad) for _, one in network.cells_and_names()] == flags


@pytest.mark.distributed
def test_ranks_agree_on_the_smallest(rank_pair, tmp_path):
    """Rank 1 is out of memory above 6 samples: both ranks find 6, for 16 samples in three micro-batches. If nothing
    fits on rank 1, both ranks raise an error. Training goes on as with the number given, with unchanged weights."""
    for rank in rank_pair.worker("tests.ranks.memory_worker", tmp_path):
        results = case(rank, "search")
        assert results["less on rank 1"] == 6
        assert "not enough on rank(s) [1]" in str(results["nothing on rank 1"])
        searched, given = case(rank, "searched"), case(rank, "given")
        for name in ("hidden.weight", "hidden.bias", "out.weight", "out.bias"):
            np.testing.assert_array_equal(searched[f"network.{name}"], given[name])
