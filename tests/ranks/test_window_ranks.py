"""Windows of several batches on two ranks: two real processes compared with MindSpore's own step.

The oracle is one process with one batch, which joins the window's batches of all ranks.
"""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from gaccum_ms import resume
from gaccum_ms.accumulation.sums import LOSS
from gaccum_ms.backend.parameters import own
from tests.ranks.window_worker import (
    ACCUMULATOR_CALLS,
    CALLS,
    RATE,
    REFUSED,
    RESUMED,
    SAMPLES,
    SAVED,
    SCALE,
    STEPS,
    TRAININGS,
    Batch,
    Calls,
    counting_step,
    file_of,
    momentum,
    state,
)
from tests.support.reference import Clipped, Regression, relative_error
from tests.support.two_ranks import Results, case

pytestmark = pytest.mark.distributed
TOLERANCE = 1e-5
Window = list[Batch]  # of all ranks together


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def trained(rank_pair, out) -> list[Results]:
    """The results of each of two ranks."""
    return rank_pair.worker("tests.ranks.window_worker", out)


@pytest.fixture(scope="module")
def resumed(trained) -> list[Results]:
    """The results of new steps on the same ranks, which go on from the checkpoints of both."""
    case(trained[0], "uninterrupted")  # this case saves
    return trained


def train_whole(windows: list[Window], rate: float = RATE, max_norm: float | None = None) -> list[Batch]:
    """State before the first window and after each, with MindSpore's own step on one process, where a window is one
    batch. In PyNative mode, because windows differ in length."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    network = Regression()
    optimizer = momentum(network.trainable_params(), rate)
    step = nn.TrainOneStepCell(network, optimizer).set_train()
    if max_norm is not None:
        step.grad_reducer = Clipped(max_norm)
    states = [state(optimizer)]
    for window in windows:
        step(*(Tensor(np.concatenate(column)) for column in zip(*window, strict=True)))
        states.append(state(optimizer))
    return states


def windows_of(ranks: list[list[Batch]], steps: int) -> list[Window]:
    """The k-th windows of all ranks, joined. The last has the remaining batches; a rank may have none."""
    cut = [[data[start : start + steps] for start in range(0, len(data), steps)] for data in ranks]
    return [[batch for part in parts for batch in part] for parts in zip_longest(*cut, fillvalue=[])]


def windows_of_calls(calls: Calls) -> list[Window]:
    windows = windows_of([calls.data(rank) for rank in range(2)], calls.steps)
    if calls.poisoned is not None:
        del windows[calls.poisoned // calls.steps]
    return windows


def ends(calls: Calls, rank: int) -> list[int]:
    """Calls that end a window."""
    number = len(calls.sizes[rank])
    full = list(range(calls.steps, number + 1, calls.steps))
    return full if len(calls.sizes[0]) == len(calls.sizes[1]) else [*full, number + 1]  # flush() is the last call


# -- calls of the step and of GradAccumulator --------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS | ACCUMULATOR_CALLS)
def test_a_window_on_two_ranks_equals_all_its_batches_on_one_process(trained, name):
    """They are equal with gradients_mean, and always with count. Without either, ranks add up, so the process needs
    twice the learning rate. A window in which a batch of one rank overflowed is left out on both. A rank with an empty
    window takes part in a flush with a count of zero. Between the ends of windows no bit changes, and nothing is sent;
    collectives are counted in PyNative mode.
    """
    calls = (CALLS | ACCUMULATOR_CALLS)[name]
    summed = 1 if calls.gradients_mean or calls.masked else 2
    expected = train_whole(windows_of_calls(calls), summed * RATE, calls.max_norm)
    for rank, results in enumerate(trained):
        got = case(results, name)
        updates = [end for end in ends(calls, rank) if not overflows(calls, end)]
        for call, (weights, moments, _) in zip([0, *updates], expected, strict=True):
            assert relative_error(got["weights"][call], weights) < TOLERANCE
            assert relative_error(got["moments"][call], summed * moments) < TOLERANCE
        np.testing.assert_array_equal(got["weights"][-1], case(trained[0], name)["weights"][-1])
        for call in range(1, len(got["weights"])):
            for kind in ("weights", "moments", "global_step", "updates"):
                same = np.array_equal(got[kind][call], got[kind][call - 1])
                assert same == (call not in updates), (kind, call)
        if calls.mode == "pynative":
            made = np.diff(got["reductions"])
            assert (np.flatnonzero(made) + 1).tolist() == ends(calls, rank)
            assert set(made.tolist()) == {0, 1}


def overflows(calls: Calls, end: int) -> bool:
    return calls.poisoned is not None and end - calls.steps <= calls.poisoned < end


@pytest.mark.device("an overflow on one rank is one on both", devices=2)
def test_overflow_in_one_batch_of_one_rank_drops_the_window_and_halves_the_scale_on_both(trained):
    name = "overflow, clipped, graph"
    calls = CALLS[name]
    end = (calls.poisoned // calls.steps + 1) * calls.steps
    for results in trained:
        got = case(results, name)
        assert got["scale"].tolist() == [SCALE] * end + [SCALE / 2] * (len(got["scale"]) - end)
        assert got["updates"][-1] == len(ends(calls, 0)) - 1


# -- different numbers of batches --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected_trainings() -> dict[str, tuple[list[np.ndarray], int]]:
    """For each training, the weights after each epoch and the number of updates. Each continues the one before."""
    windows, ends_of = [], {}
    for name, training in TRAININGS.items():
        start, ends_of[name] = len(windows), []
        for epoch in range(1 if training.stop else training.epochs):
            windows += windows_of([training.data(rank)[: training.stop] for rank in range(2)], training.steps(epoch))
            ends_of[name].append(len(windows))
        ends_of[name].append(start)
    states = train_whole(windows)
    return {name: ([states[end][0] for end in each], each[-1] - start) for name, (*each, start) in ends_of.items()}


@pytest.mark.parametrize("name", TRAININGS)
def test_ranks_with_different_numbers_of_batches_make_equally_many_updates_on_the_joined_windows(
    trained, expected_trainings, name
):
    """Each window has one record on every rank, also where a rank had nothing left for it."""
    weights, updates = expected_trainings[name]
    training, both = TRAININGS[name], [case(results, name) for results in trained]
    of_window = [got["records"][:, 1] for got in both]
    for rank, got in enumerate(both):
        assert got["updates"] == updates
        assert got["batches"] == len(training.data(rank)[: training.stop]) * len(weights)
        assert len(got["weights"]) == len(weights)
        for epoch, one in enumerate(weights):
            assert relative_error(got["weights"][epoch], one) < TOLERANCE, epoch
        np.testing.assert_array_equal(got["weights"], both[0]["weights"])
        update, batches, losses, count = got["records"].T
        assert update.tolist() == (np.arange(updates) + update[0]).tolist()
        np.testing.assert_array_equal(batches, losses)
        assert batches.sum() == got["batches"]
        np.testing.assert_array_equal(count, sum(of_window) * SAMPLES)


@pytest.mark.parametrize("name", REFUSED)
def test_different_numbers_of_batches_without_a_flush_are_refused_on_both_ranks_before_training(trained, name):
    texts = {
        "no flush": ("3 on rank 0, 2 on rank 1", "FlushAccumulation()"),
        "schedule by updates": ("must be a dict of epochs", "[3, 2] batches"),
    }
    for results in trained:
        got = case(results, name)
        assert all(text in str(got["message"]) for text in texts[name])
        assert not got["changed"]
        assert got["batch_count"] == 0


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_ranks_that_save_under_the_same_names_are_refused_before_training(trained, out):
    for results in trained:
        got = case(results, "saving")
        message, later = map(str, got["messages"])
        assert "got ranks 0, 1 with the folder" in message
        assert f"'{(out / 'all').resolve()}' and the prefix 'net'" in message
        assert 'Use directory=f"checkpoints/{rank}"' in message
        assert later == ""
        assert got["batch_count"] == 6


@pytest.mark.parametrize("name", RESUMED)
def test_two_ranks_that_resume_go_on_as_if_not_interrupted(resumed, name):
    """The results are bit-identical, and only the later batches are seen."""
    for results in resumed:
        got, uninterrupted = case(results, name), case(results, "uninterrupted")
        for kind in ("weights", "moments", "updates"):
            np.testing.assert_array_equal(got[kind], uninterrupted[kind])
        np.testing.assert_array_equal(got["seen"], uninterrupted["seen"][RESUMED[name][0] :])


def test_one_process_goes_on_with_the_losses_of_both_ranks(out, resumed):
    files = [file_of(out, SAVED, rank) for rank in range(2)]
    saved = [ms.load_checkpoint(str(file)) for file in files]
    losses = [float(values[own("window_sums")][LOSS]) / float(values[own("window_unit")]) for values in saved]
    step = counting_step()
    resume(step, files)
    values = step.parameters_dict()
    joined = float(values[own("window_sums")][LOSS]) / float(values[own("window_unit")])
    assert min(losses) > 0
    assert joined == pytest.approx(sum(losses), rel=1e-6)


def test_rank_0s_file_in_mid_window_is_refused_by_resume_and_loaded_plainly_on_rank_1(resumed):
    """By `resume` , and plainly loaded at the first call. Rank 0 does not refuse the file, because it is its
    own. One from between two windows is of all ranks."""
    for rank, results in enumerate(resumed):
        got = case(results, "rank 0's file")
        refused = "all 2 rank(s)' are needed to finish it on rank 1 of 2" in str(got["message"])
        assert refused == bool(got["message"]) == (rank == 1)
        assert got["changed"] == (rank == 0)
        loaded = case(results, f"plain {SAVED}")
        message = str(loaded["message"])
        assert ("sums of rank 0 of 2 on rank 1 of 2" in message and "gaccum_ms.resume" in message) == (rank == 1)
        assert loaded["position"] == SAVED % STEPS + (rank == 0)  # on rank 1 nothing was added
        between = case(results, f"plain {2 * SAVED}")
        assert (str(between["message"]), int(between["position"])) == ("", 1)
