"""Windows of several batches on two ranks: trainings by ms.Model with different numbers of batches, and checkpoints.
That windows equal all their batches on one process is shown by test_setups_ranks.py, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.communication import get_rank
from mindspore.train import Callback, CheckpointConfig, ModelCheckpoint

from gaccum_ms import (
    AccumulationScheduler,
    CountMask,
    FlushAccumulation,
    TrainOneStepWithGradAccumulationCell,
    WindowMonitor,
    resume,
)
from gaccum_ms.accumulation.open_window import LOSS
from gaccum_ms.backend.parameters import own
from tests.options.test_setups import MOMENTUM, SCALED, play
from tests.ranks.cases import error_of, named, set_up
from tests.support.history_oracle import Setup
from tests.support.reference import Regression, as_numpy, batches, make_step, relative_error, vector
from tests.support.two_ranks import Results, case, results_of

pytestmark = pytest.mark.distributed
Batch = tuple[np.ndarray, ...]


trained = results_of("test_window_ranks")


def momentum(weights: Sequence[ms.Parameter]) -> nn.Momentum:
    return nn.Momentum(weights, 0.05, 0.9)


def step_of(**options: Any) -> TrainOneStepWithGradAccumulationCell:
    return make_step(Regression(), momentum, micro_size=2, accumulation_steps=STEPS, **options)


def state(optimizer: nn.Momentum) -> np.ndarray:
    return vector([*optimizer.parameters, *optimizer.moments])


# -- an overflow -------------------------------------------------------------------------------------------------------


def overflow(out: Path) -> Results:
    setup = Setup(micro_size=2, steps=2, max_norm=0.2, **SCALED, **MOMENTUM, mode="graph")
    history = play(setup, "train train train poisoned train train", 2, get_rank(), lengths=[5])
    step = history.trainer
    numbers = [float(one.asnumpy()) for one in (step.scale_sense, step.update_count)]
    return named("overflow", {"weights": vector(step.weights), "numbers": numbers})


@pytest.mark.device("an overflow on one rank is one on both", devices=2)
def test_overflow_in_one_batch_of_one_rank_drops_the_window_and_halves_the_scale_on_both(trained):
    """Each call does what NumPy does."""
    both = [case(results, "overflow") for results in trained]
    np.testing.assert_array_equal(both[0]["weights"], both[1]["weights"])
    assert both[0]["numbers"].tolist() == both[1]["numbers"].tolist() == [SCALED["scale"][0] / 2, 2]


# -- ms.Model, with different numbers of batches on the ranks ----------------------------------------------------------

SAMPLES = 4
STEPS = 4  # of all models below


class Training(NamedTuple):
    """One call of model.train, which continues the one before."""

    batches: tuple[int, int]
    epochs: int = 1
    schedule: dict[int, int] | None = None
    stop: int | None = None  # batches of the first epoch, on each rank that has as many
    flushes: int = 1  # two callbacks must not flush twice as often

    def data(self, rank: int) -> list[Batch]:
        return batches(SAMPLES, self.batches[rank], seed=1000 * sum(self.batches) + rank)

    def windows(self, epoch: int) -> list[list[Batch]]:
        """The k-th windows of both ranks, joined. The last has the remaining batches; a rank may have none."""
        steps = self.schedule[epoch] if self.schedule else STEPS
        data = [self.data(rank)[: self.stop] for rank in range(2)]
        cut = [[one[start : start + steps] for start in range(0, len(one), steps)] for one in data]
        return [[batch for part in parts for batch in part] for parts in zip_longest(*cut, fillvalue=[])]


TRAININGS = {
    "5 and 4: 1 and 0 in the last window, and rank 1 has none open": Training((5, 4), flushes=2),
    "2 and 3: rank 0 is shorter, no window is full": Training((2, 3), 2),
    "9 and 7, scheduled": Training((9, 7), 3, {0: 4, 1: 2, 2: 3}),
    # A stop before the epoch's end leaves ranks with fewer batches than they announced.
    "9 and 7, stopped after 8": Training((9, 7), stop=8),
}


class Watch(Callback):
    """Records the weights at each epoch's end and the first feature of each sample seen; stops after `stop` batches."""

    def __init__(self, stop: int | None = None) -> None:
        super().__init__()
        self.stop = stop
        self.weights: list[np.ndarray] = []
        self.seen: list[np.ndarray] = []

    def on_train_step_begin(self, run_context):
        self.seen.append(np.array(run_context.original_args().train_dataset_element[0].asnumpy()[:, 0]))

    def on_train_step_end(self, run_context):
        if len(self.seen) == self.stop:
            run_context.request_stop()

    def on_train_epoch_end(self, run_context):
        self.weights.append(vector(run_context.original_args().train_network.weights))


def as_data_set(data: Sequence[Batch]) -> Any:
    columns = tuple(np.concatenate(column) for column in zip(*data, strict=True))
    return ms.dataset.NumpySlicesDataset(columns, shuffle=False).batch(SAMPLES)


def train_models(out: Path) -> Results:
    set_up()
    step, results = step_of(), {}
    for name, training in TRAININGS.items():
        watch, monitor = Watch(training.stop), WindowMonitor()
        callbacks = [watch, monitor, *(FlushAccumulation() for _ in range(training.flushes))]
        if training.schedule:
            callbacks.append(AccumulationScheduler(training.schedule))
        before = int(step.update_count.asnumpy())
        ms.Model(step).train(training.epochs, as_data_set(training.data(get_rank())), callbacks=callbacks)
        step.set_accumulation_steps(STEPS)
        rows = [(record.update, record.batches, len(record.losses), record.count) for record in monitor.records]
        found = {"weights": watch.weights, "updates": int(step.update_count.asnumpy()) - before}
        results |= named(name, found | {"batches": len(watch.seen), "records": rows})
    return results


@pytest.fixture(scope="module")
def expected_trainings() -> dict[str, tuple[list[np.ndarray], int]]:
    """For each training, the weights after each epoch and the number of updates, with MindSpore's own step on one
    process, where a window is one batch. Each training continues the one before."""
    ms.set_context(mode=ms.PYNATIVE_MODE)  # windows differ in length
    network, expected = Regression(), {}
    step = nn.TrainOneStepCell(network, momentum(network.trainable_params())).set_train()
    for name, training in TRAININGS.items():
        weights, updates = [], 0
        for epoch in range(1 if training.stop else training.epochs):
            windows = training.windows(epoch)
            for window in windows:
                step(*(Tensor(np.concatenate(column)) for column in zip(*window, strict=True)))
            weights.append(vector(step.weights))
            updates += len(windows)
        expected[name] = weights, updates
    return expected


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
        assert max(map(relative_error, got["weights"], weights)) < 1e-5
        np.testing.assert_array_equal(got["weights"], both[0]["weights"])
        update, batches, losses, count = got["records"].T
        assert update.tolist() == (np.arange(updates) + update[0]).tolist()
        np.testing.assert_array_equal(batches, losses)
        assert batches.sum() == got["batches"]
        np.testing.assert_array_equal(count, sum(of_window) * SAMPLES)


REFUSED: dict[str, tuple[list[Callback], str, str]] = {
    "no flush": ([], "3 on rank 0, 2 on rank 1", "FlushAccumulation()"),
    "schedule by updates": (
        [FlushAccumulation(), AccumulationScheduler(lambda updates: 2 + updates // 4)],
        *("must be a dict of epochs", "[3, 2] batches"),
    ),
}


def refuse_to_train(out: Path) -> Results:
    set_up()
    step, results = step_of(), {}
    for name, (callbacks, *_) in REFUSED.items():
        data_set, before = as_data_set(Training((3, 2)).data(get_rank())), state(step.optimizer)
        message = error_of(lambda: ms.Model(step).train(1, data_set, callbacks=callbacks))  # noqa: B023
        changed = not np.array_equal(before, state(step.optimizer))
        results |= named(name, {"message": message, "changed": changed, "batch_count": as_numpy(step.batch_count)})
    return results


@pytest.mark.parametrize("name", REFUSED)
def test_different_numbers_of_batches_without_a_flush_are_refused_on_both_ranks_before_training(trained, name):
    for results in trained:
        got = case(results, name)
        assert all(text in str(got["message"]) for text in REFUSED[name][1:])
        assert not got["changed"]
        assert got["batch_count"] == 0


# -- checkpoints -------------------------------------------------------------------------------------------------------


def save_under_the_same_names(out: Path) -> Results:
    """Ranks that save in one folder, and then in folders of their own."""
    set_up()
    step, messages = step_of(), []
    for folder in ("all", str(get_rank())):
        saver = ModelCheckpoint("net", str(out / folder), CheckpointConfig(1, keep_checkpoint_max=2))
        data_set = as_data_set(Training((2, 2)).data(get_rank()))
        messages.append(error_of(lambda: ms.Model(step).train(3, data_set, callbacks=[saver])))  # noqa: B023
    return named("saving", {"messages": messages, "batch_count": as_numpy(step.batch_count)})


def test_ranks_that_save_under_the_same_names_are_refused_before_training(trained, out):
    for results in trained:
        got = case(results, "saving")
        message, later = map(str, got["messages"])
        assert "got ranks 0, 1 with the folder" in message
        assert f"'{(out / 'all').resolve()}' and the prefix 'net'" in message
        assert 'Use directory=f"checkpoints/{rank}"' in message
        assert later == ""
        assert got["batch_count"] == 6


BATCH, EPOCH, EPOCHS = 3, 10, 2  # samples of a batch, batches of a rank's epoch
SAVED = 6  # batches of each rank between checkpoints: in mid-window, between windows


def samples() -> Batch:
    """The data of all ranks. The masks of odd samples, which rank 1 of two gets, are heavy."""
    x, y = batches(2 * BATCH * EPOCH, 1, seed=9)[0]
    random = np.random.default_rng(10)
    mask = random.uniform(0.01, 0.1, len(x)) * np.where(np.arange(len(x)) % 2, 90, 1)
    return x, y, mask.astype(np.float32)


def file_of(out: Path, saved: int, rank: int) -> str:
    """The checkpoint of a rank after `saved` of its batches."""
    return str(out / f"run-{rank}" / f"run-{(saved - 1) // EPOCH + 1}_{(saved - 1) % EPOCH + 1}.ckpt")


def train_on(name: str, step: Any, finished: Callable[[Any], int], *callbacks: Callback) -> Results:
    """Train to the end of the last epoch, where an incomplete window updates too. ``finished(data_set)`` is the number
    of epochs before."""
    data_set = ms.dataset.NumpySlicesDataset(samples(), shuffle=False, num_shards=2, shard_id=get_rank()).batch(BATCH)
    watch, epoch = Watch(), finished(data_set)
    callbacks = [watch, FlushAccumulation(each_epoch=False), *callbacks]
    ms.Model(step).train(EPOCHS, data_set, callbacks=callbacks, initial_epoch=epoch)
    updates = as_numpy(step.update_count)
    return named(name, {"state": state(step.optimizer), "updates": updates, "seen": watch.seen})


def train_and_save(out: Path) -> Results:
    """Train without an interruption, and save checkpoints."""
    set_up()
    saver = ModelCheckpoint("run", str(out / f"run-{get_rank()}"), CheckpointConfig(save_checkpoint_steps=SAVED))
    return train_on("uninterrupted", step_of(count=CountMask()), lambda data_set: 0, saver)


# The checkpoint's batches, and the ranks whose files each rank reads.
RESUMED: dict[str, tuple[int, Callable[[int], tuple[int, ...]]]] = {
    "in mid-window": (SAVED, lambda rank: (rank,)),
    "all files, in any order": (SAVED, lambda rank: (1, 0)),
    "between windows, rank 0's file": (2 * SAVED, lambda rank: (0,)),
}


def resume_on_ranks(out: Path) -> Results:
    set_up()
    step, results = step_of(count=CountMask()), {}  # the first resume is of a step that has not run
    for name, (saved, whose) in RESUMED.items():
        files = [file_of(out, saved, one) for one in whose(get_rank())]
        results |= train_on(name, step, lambda data_set: resume(step, files, data_set))  # noqa: B023
    before = state(step.optimizer)
    message = error_of(lambda: resume(step, file_of(out, SAVED, 0)))
    changed = not np.array_equal(before, state(step.optimizer))
    return results | named("rank 0's file", {"message": message, "changed": changed})


def load_plainly(out: Path) -> Results:
    """Load rank 0's files on both ranks by MindSpore's own functions, in mid-window and between windows."""
    set_up()
    results = {}
    batch = [Tensor(column[:BATCH]) for column in samples()]
    for saved in (SAVED, 2 * SAVED):
        step = step_of(count=CountMask())
        ms.load_param_into_net(step, ms.load_checkpoint(file_of(out, saved, 0)))
        message = error_of(lambda: step(*batch))  # noqa: B023
        results |= named(f"plain {saved}", {"message": message, "position": as_numpy(step.window_position)})
    return results


@pytest.fixture(scope="module")
def resumed(trained) -> list[Results]:
    """The results of new steps on the same ranks, which go on from the checkpoints of both."""
    case(trained[0], "uninterrupted")  # this case saves
    return trained


@pytest.mark.parametrize("name", RESUMED)
def test_two_ranks_that_resume_go_on_as_if_not_interrupted(resumed, name):
    """The results are bit-identical, and only the later batches are seen."""
    for results in resumed:
        got, uninterrupted = case(results, name), case(results, "uninterrupted")
        for kind in ("state", "updates"):
            np.testing.assert_array_equal(got[kind], uninterrupted[kind])
        np.testing.assert_array_equal(got["seen"], uninterrupted["seen"][RESUMED[name][0] :])


def test_one_process_goes_on_with_the_losses_of_both_ranks(out, resumed):
    def loss_in(values: Any) -> float:
        return float(values[own("window_sums")][LOSS]) / float(values[own("window_unit")])

    files = [file_of(out, SAVED, rank) for rank in range(2)]
    losses = [loss_in(ms.load_checkpoint(file)) for file in files]
    step = step_of(count=CountMask())
    resume(step, files)
    assert min(losses) > 0
    assert loss_in(step.parameters_dict()) == pytest.approx(sum(losses), rel=1e-6)


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


CASES: dict[str, Callable[[Path], Results]] = {
    "overflow": overflow,
    **dict.fromkeys(TRAININGS, train_models),
    **dict.fromkeys(REFUSED, refuse_to_train),
    "saving": save_under_the_same_names,
    "uninterrupted": train_and_save,
    **dict.fromkeys([*RESUMED, "rank 0's file"], resume_on_ranks),
    **dict.fromkeys((f"plain {saved}" for saved in (SAVED, 2 * SAVED)), load_plainly),
}
