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
    BATCH,
    CALLS,
    EPOCH,
    EPOCHS,
    RATE,
    RECORDED,
    REFUSED,
    SAMPLES,
    SAVED,
    SAVED_ALONE,
    SAVING,
    SCALE,
    STEPS,
    TRAININGS,
    Batch,
    Calls,
    accumulator_by_hand,
    accumulator_file,
    file_of,
    go_on,
    make_model,
    momentum,
    recorded_data,
    samples,
    save_alone,
    share,
    state,
)
from tests.support import window_oracle as oracle
from tests.support.reference import Clipped, Regression, relative_error
from tests.support.two_ranks import Results, case

pytestmark = pytest.mark.distributed
TOLERANCE = 1e-5
Window = list[Batch]  # of all ranks together

ALL_CALLS = CALLS | ACCUMULATOR_CALLS
EAGER_CALLS = [name for name, calls in ALL_CALLS.items() if calls.mode == "pynative"]


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def trained(rank_pair, out) -> list[Results]:
    """The results of each of two ranks."""
    return rank_pair.worker("tests.ranks.window_worker", out)


@pytest.fixture(scope="module")
def resumed(out, trained) -> list[Results]:
    """The results of new models on the same ranks, which go on from the checkpoints of both ranks and of one
    process."""
    case(trained[0], "uninterrupted")  # this case saves
    save_alone(out)
    return trained


class Oracle:
    """MindSpore's own step on one process, where a window is one batch."""

    def __init__(self, masked: bool, rate: float = RATE, max_norm: float | None = None) -> None:
        self.mode = ms.PYNATIVE_MODE  # windows differ in length, and graph mode would compile each length
        ms.set_context(mode=self.mode)
        loss_cell = Regression()
        self.optimizer = momentum(loss_cell, rate)
        self.step = nn.TrainOneStepCell(loss_cell, self.optimizer).set_train()
        if max_norm is not None:
            self.step.grad_reducer = Clipped(max_norm)

    def train(self, windows: list[Window]) -> list[Batch]:
        """State before the first window and after each."""
        ms.set_context(mode=self.mode)
        states = [state(self.optimizer)]
        for window in windows:
            self.step(*(Tensor(np.concatenate(column)) for column in zip(*window, strict=True)))
            states.append(state(self.optimizer))
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


@pytest.mark.core(name=EAGER_CALLS)
@pytest.mark.parametrize("name", ALL_CALLS)
def test_a_window_on_two_ranks_equals_all_its_batches_on_one_process(trained, name):
    """They are equal with gradients_mean, and always with count. Without either, ranks add up, so the process needs
    twice the learning rate. A window in which a batch of one rank overflowed is left out on both. A rank with an empty
    window takes part in a flush with a count of zero.
    """
    calls = ALL_CALLS[name]
    summed = 1 if calls.gradients_mean or calls.masked else 2
    expected = Oracle(calls.masked, summed * RATE, calls.max_norm).train(windows_of_calls(calls))
    if calls.max_norm is not None:
        unclipped = Oracle(calls.masked, summed * RATE).train(windows_of_calls(calls))
        assert relative_error(expected[-1][0], unclipped[-1][0]) > 100 * TOLERANCE
    assert relative_error(expected[-1][0], expected[0][0]) > 100 * TOLERANCE
    for rank, results in enumerate(trained):
        got = case(results, name)
        last = [0, *(end for end in ends(calls, rank) if not overflows(calls, end))]
        assert len(last) == len(expected)
        for call, (weights, moments, _) in zip(last, expected, strict=True):
            assert relative_error(got["weights"][call], weights) < TOLERANCE
            assert relative_error(got["moments"][call], summed * moments) < TOLERANCE
        np.testing.assert_array_equal(got["weights"][-1], case(trained[0], name)["weights"][-1])


def overflows(calls: Calls, end: int) -> bool:
    return calls.poisoned is not None and end - calls.steps <= calls.poisoned < end


@pytest.mark.core(name=EAGER_CALLS)
@pytest.mark.parametrize("name", ALL_CALLS)
def test_batches_that_do_not_end_a_window_change_no_bit_of_weights_and_optimizer(trained, name):
    for rank, results in enumerate(trained):
        got, calls = case(results, name), ALL_CALLS[name]
        changes = [end for end in ends(calls, rank) if not overflows(calls, end)]
        for call in range(1, len(got["weights"])):
            for kind in ("weights", "moments", "global_step", "updates"):
                same = np.array_equal(got[kind][call], got[kind][call - 1])
                assert same == (call not in changes), (kind, call)


@pytest.mark.parametrize("name", EAGER_CALLS)
def test_one_reduction_at_the_end_of_each_window_and_none_before(trained, name):
    """The collectives are counted in PyNative mode."""
    for rank, results in enumerate(trained):
        made = np.diff(case(results, name)["reductions"])
        assert (np.flatnonzero(made) + 1).tolist() == ends(ALL_CALLS[name], rank)
        assert set(made.tolist()) == {0, 1}


@pytest.mark.device("an overflow on one rank is one on both", devices=2)
def test_overflow_in_one_batch_of_one_rank_drops_the_window_and_halves_the_scale_on_both(trained):
    name = "overflow, clipped"
    calls = ALL_CALLS[name]
    end = (calls.poisoned // calls.steps + 1) * calls.steps
    for results in trained:
        got = case(results, name)
        assert got["scale"].tolist() == [SCALE] * end + [SCALE / 2] * (len(got["scale"]) - end)
        assert got["updates"][-1] == len(ends(calls, 0)) - 1


# -- different numbers of batches --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected_trainings() -> dict[str, tuple[list[np.ndarray], int]]:
    """For each training, the weights after each epoch and the number of updates."""
    oracle, expected = Oracle(masked=False), {}
    for name, training in TRAININGS.items():
        epochs = 1 if training.stop else training.epochs
        cut = [
            windows_of([training.data(rank)[: training.stop] for rank in range(2)], training.steps(epoch))
            for epoch in range(epochs)
        ]
        weights = [oracle.train(windows)[-1][0] for windows in cut]
        expected[name] = weights, sum(map(len, cut))
    return expected


@pytest.mark.parametrize("name", TRAININGS)
def test_ranks_with_different_numbers_of_batches_make_equally_many_updates_on_the_joined_windows(
    trained, expected_trainings, name
):
    weights, updates = expected_trainings[name]
    for rank, results in enumerate(trained):
        got, training = case(results, name), TRAININGS[name]
        assert got["updates"] == updates
        assert got["batches"] == len(training.data(rank)[: training.stop]) * len(weights)
        assert len(got["weights"]) == len(weights)
        for epoch, one in enumerate(weights):
            assert relative_error(got["weights"][epoch], one) < TOLERANCE, epoch
        np.testing.assert_array_equal(got["weights"], case(trained[0], name)["weights"])


@pytest.mark.parametrize("name", TRAININGS)
def test_each_window_has_one_record_on_every_rank_also_where_a_rank_had_nothing_left_for_it(trained, name):
    records = (case(results, name)["records"].T for results in trained)
    update, batches, losses, count = zip(*records, strict=True)
    for rank in range(2):
        assert update[rank].tolist() == (np.arange(len(update[rank])) + update[rank][0]).tolist()
        np.testing.assert_array_equal(batches[rank], losses[rank])
        assert batches[rank].sum() == case(trained[rank], name)["batches"]
    np.testing.assert_array_equal(count[0], count[1])
    np.testing.assert_array_equal(count[0], (batches[0] + batches[1]) * SAMPLES)


def recorded(name: str, rank: int) -> dict[str, np.ndarray]:
    """The expected records of a rank's monitor: with counts the means of all ranks, without them its own."""
    network, options = RECORDED[name]
    terms = {oracle.Mean: [oracle.squares], oracle.Masked: [oracle.masked]}
    terms = terms.get(network, [oracle.masked, oracle.mean])
    steps, several = options.get("accumulation_steps", 1), len(terms) > 1
    plan = oracle.Plan(micro_size=2, drops="overflow" in options)
    data = [recorded_data(name, one) for one in (0, 1)]
    weight, rows = 1.0, []
    for at in range(0, 2, steps):
        own, everything = (data[rank][at : at + steps], data[0][at : at + steps] + data[1][at : at + steps])
        of_all = [oracle.sums_of(plan, term, weight, everything) for term in terms]
        of_own = oracle.sums_of(plan, terms[0], weight, own)
        of_batches = [oracle.sums_of(plan, terms[0], weight, [batch]) for batch in own]
        means = [one.mean() for one in of_all]
        loss, gradient = (sum(column) for column in zip(*means, strict=True))
        if "count" in options and steps == 1:
            losses, counts = [loss], [one.items for one in of_all]
        else:
            losses, counts = [one.mean()[0] for one in of_batches], [one.items for one in of_batches]
        row = {"updated": True, "losses": losses, "loss": loss, "counts": counts}
        row["count"] = np.nan if several else of_all[0].kept
        row["loss_terms"] = [mean for mean, _ in means] if several else np.nan
        row["dropped_micro_batches"] = of_all[0].dropped
        row["grad_norm"] = abs(gradient) if "max_grad_norm" in options else np.nan
        if "count" not in options:
            row["loss"] = of_own.mean()[0]
        rows.append(row)
        limit = options.get("max_grad_norm", np.inf)
        weight -= RATE * np.clip(gradient, -limit, limit)
    return {field: np.array([row[field] for row in rows], np.float64) for field in oracle.FIELDS}


@pytest.mark.parametrize("name", RECORDED)
def test_records_say_what_all_ranks_counted_and_what_this_one_did(trained, name):
    with np.errstate(all="ignore"):
        for rank, results in enumerate(trained):
            got, expected = case(results, f"records of {name}"), recorded(name, rank)
            for field in oracle.FIELDS:
                np.testing.assert_allclose(got[field], expected[field], rtol=1e-5, err_msg=f"{field} of rank {rank}")


@pytest.mark.parametrize("name", REFUSED)
def test_different_numbers_of_batches_without_a_flush_are_refused_on_both_ranks_before_training(trained, name):
    for results in trained:
        got = case(results, name)
        message = str(got["message"])
        if name == "schedule by updates":
            assert "must be a dict of epochs" in message
            assert "[3, 2] batches" in message
        else:
            assert "3 on rank 0, 2 on rank 1" in message
            assert "FlushAccumulation()" in message
        assert not got["changed"]
        assert got["batch_count"] == 0


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_ranks_that_save_under_the_same_names_are_refused_before_training(trained, out):
    for results in trained:
        message = str(case(results, "saving: one folder")["message"])
        assert "got ranks 0, 1 with the folder" in message
        assert f"'{(out / 'one folder' / 'all').resolve()}' and the prefix 'net'" in message
        assert 'Use directory=f"checkpoints/{rank}"' in message
        assert case(results, "saving: one folder")["batch_count"] == 0, "nothing was trained"
        for number, name in enumerate(SAVING):
            assert (str(case(results, f"saving: {name}")["message"]) == "") == (number > 0)
            assert case(results, f"saving: {name}")["batch_count"] == 6 * number


def indices(number: int, rank: int, ranks: int) -> np.ndarray:
    """The samples in a rank's batch `number` , which is counted from the first epoch on."""
    number %= EPOCH // ranks
    return (number * BATCH + np.arange(BATCH)) * ranks + rank


def expected_windows(saved: int, old: int, new: int) -> list[list[np.ndarray]]:
    """The samples in each window when `new` ranks go on where `old` ranks had each seen `saved` batches."""
    windows = [
        [indices(number, rank, old) for number in range(start, min(start + STEPS, saved)) for rank in range(old)]
        for start in range(0, saved, STEPS)
    ]
    position = saved * old // new
    if saved % STEPS:
        ending = range(position, position + STEPS - saved % STEPS)
        windows[-1] += [indices(number, rank, new) for number in ending for rank in range(new)]
        position = ending.stop
    last = EPOCHS * EPOCH // new
    return windows + [
        [indices(number, rank, new) for number in range(start, min(start + STEPS, last)) for rank in range(new)]
        for start in range(position, last, STEPS)
    ]


def assert_went_on(got: Results, saved: int, old: int, new: int, rank: int = 0) -> None:
    """Check that weights, optimizer state, updates and the samples seen equal the oracle's."""
    data, windows = samples(), expected_windows(saved, old, new)
    joined = [[tuple(column[index] for column in data) for index in window] for window in windows]
    weights, moments, _ = Oracle(masked=True).train(joined)[-1]
    assert relative_error(got["weights"], weights) < TOLERANCE
    assert relative_error(got["moments"], moments) < TOLERANCE
    assert got["updates"] == len(windows)
    assert_saw_the_right_samples(got, saved, old, new, rank)


def assert_saw_the_right_samples(got: Results, saved: int, old: int, new: int, rank: int) -> None:
    first = samples()[0][:, 0]
    assert len(set(first)) == len(first)  # it identifies the sample
    ids = [np.array([np.flatnonzero(first == value)[0] for value in batch]) for batch in got["seen"]]
    expected = [indices(number, rank, new) for number in range(saved * old // new, EPOCHS * EPOCH // new)]
    np.testing.assert_array_equal(ids, expected)


def test_the_run_that_is_not_interrupted_equals_the_joined_windows(trained):
    for rank, results in enumerate(trained):
        assert_went_on(case(results, "uninterrupted"), 0, 2, 2, rank)


@pytest.mark.parametrize("saved", [SAVED, 2 * SAVED, 3 * SAVED])
def test_two_ranks_that_resume_each_from_its_own_file_go_on_as_if_not_interrupted(resumed, saved):
    """The results are bit-identical, in mid-window, between windows and in mid-window of the second epoch, and only
    the later batches are seen."""
    for results in resumed:
        assert_not_interrupted(case(results, f"after {saved}"), case(results, "uninterrupted"), saved)


def assert_not_interrupted(got: Results, uninterrupted: Results, saved: int) -> None:
    for name in ("weights", "moments", "updates"):
        np.testing.assert_array_equal(got[name], uninterrupted[name])
    np.testing.assert_array_equal(got["seen"], uninterrupted["seen"][saved:])


def test_each_rank_may_read_the_files_of_all_in_any_order(resumed):
    for results in resumed:
        assert_not_interrupted(case(results, "all files"), case(results, "uninterrupted"), SAVED)


@pytest.mark.core(saved=SAVED)
@pytest.mark.parametrize("saved", [SAVED, 2 * SAVED, 3 * SAVED])
def test_one_process_finishes_the_window_of_two_ranks(out, resumed, saved, pynative):
    """The files are from mid-window, from between two windows, and from mid-window of the second epoch."""
    model = make_model(True, accumulation_steps=STEPS)
    files = [file_of(out, saved, rank) for rank in range(2)]
    with pytest.warns(UserWarning, match=r"an update has 12 samples, 4 .* 1 rank\(s\), where it had 24 samples, 4 "):
        got = go_on("one", model, files, share())
    assert_went_on(case(got, "one"), saved, 2, 1)


def test_one_process_goes_on_with_the_losses_of_both_ranks(out, resumed):
    files = [file_of(out, SAVED, rank) for rank in range(2)]
    saved = [ms.load_checkpoint(str(file)) for file in files]
    losses = [float(values[own("window_sums")][LOSS]) / float(values[own("window_unit")]) for values in saved]
    step = make_model(True, accumulation_steps=STEPS).train_network
    resume(step, files)
    values = step.parameters_dict()
    joined = float(values[own("window_sums")][LOSS]) / float(values[own("window_unit")])
    assert min(losses) > 0
    assert joined == pytest.approx(sum(losses), rel=1e-6)


def test_accumulators_without_counts_finish_a_window_on_another_number_of_ranks(out, trained):
    """With gradients_mean=False the mean is times the ranks that finish the window, as in the step."""
    alone, _, add = accumulator_by_hand()
    for gradient in (1.0, 3.0):
        add(gradient)
    ms.save_checkpoint(alone, accumulator_file(out, "alone"))
    for results in trained:
        got = case(results, "accumulators on other ranks")
        assert got["flush"] == -2 * np.mean([1, 3])
        assert got["batches"] == -2 * np.mean([1, 3, 6, 8, 6, 8])
    for more in ((), (7.0, 9.0)):
        accumulator, weight, add = accumulator_by_hand()
        resume(accumulator, [accumulator_file(out, rank) for rank in range(2)])
        for gradient in more:
            add(gradient)
        accumulator.flush()
        np.testing.assert_allclose(weight.asnumpy(), -np.mean([1, 3, 2, 4, *more]), rtol=1e-6)


def test_a_flush_trains_nothing_if_no_rank_has_batches(trained):
    """With `min_count` , too, by which a window that counts nothing is an update."""
    for results in trained:
        got = case(results, "flush of nothing")
        assert not got["first"] and not got["then"] and got["last"]
        records = {f"gaccum_ms.{name}" for name in ("window_count", "window_loss", "window_batches", "grad_norm")}
        assert set(got["changed"].tolist()) <= records


def test_two_ranks_finish_the_window_of_one_process(resumed):
    for rank, results in enumerate(resumed):
        assert_went_on(case(results, "from one process"), SAVED_ALONE[-1], 1, 2, rank)


def test_rank_0s_file_in_mid_window_is_refused_on_rank_1_and_on_one_process(out, resumed):
    """Rank 0 does not refuse the file, because it is its own."""
    got = case(resumed[1], "rank 0's file")
    assert "all 2 rank(s)' are needed to finish it on rank 1 of 2" in str(got["message"])
    assert "of rank 0 of 2" in str(got["message"])
    assert not got["changed"]
    model = make_model(True, accumulation_steps=STEPS)
    for rank in range(2):
        with pytest.raises(ValueError, match=rf"on rank 0 of 1, but got .* of rank {rank} of 2"):
            resume(model, file_of(out, SAVED, rank))
    assert int(model.train_network.window_position.asnumpy()) == 0


def test_rank_0s_file_in_mid_window_loaded_plainly_on_rank_1_is_refused_at_the_first_call(resumed):
    message = str(resumed[1][f"plain {SAVED}/message"])
    assert "sums of rank 0 of 2 on rank 1 of 2" in message
    assert "gaccum_ms.resume" in message
    assert resumed[1][f"plain {SAVED}/position"] == SAVED % STEPS  # nothing was added
    assert not str(resumed[0][f"plain {SAVED}/message"])
    assert resumed[0][f"plain {SAVED}/position"] == SAVED % STEPS + 1


def test_a_checkpoint_between_windows_resumes_anywhere(resumed):
    """Both ranks resume from rank 0's checkpoint."""
    for results in resumed:
        got = case(results, "between windows, rank 0's file")
        assert_not_interrupted(got, case(results, "uninterrupted"), 2 * SAVED)


def test_a_checkpoint_between_windows_loads_plainly_anywhere(out, resumed, pynative):
    for results in resumed:
        assert not str(results[f"plain {2 * SAVED}/message"])
        assert results[f"plain {2 * SAVED}/position"] == 1
    step = make_model(True, accumulation_steps=STEPS).train_network
    ms.load_param_into_net(step, ms.load_checkpoint(file_of(out, 2 * SAVED, 1)))
    step(*(Tensor(column[:BATCH]) for column in samples()))
    assert int(step.window_position.asnumpy()) == 1


def test_a_position_that_does_not_divide_by_the_ranks_is_refused_with_both_numbers(resumed):
    for results in resumed:
        got = case(results, "5 batches")
        assert "got [5] on each of 1 rank(s), and now 2" in str(got["message"])
        assert not got["changed"]


def test_a_data_set_of_another_length_is_refused_with_both_numbers(out, resumed):
    model = make_model(True, accumulation_steps=STEPS)
    files = [file_of(out, SAVED, rank) for rank in range(2)]
    with pytest.raises(ValueError, match=r"got 10 an epoch on each of 1 rank\(s\), .* has 10 on each of 2"):
        resume(model, files, share(0, 2))
