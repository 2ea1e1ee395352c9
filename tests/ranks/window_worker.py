"""The cases of test_window_ranks.py on ranks (support/ranks.py), and their data: windows of several batches on two
ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import get_rank
from mindspore.train import Callback, CheckpointConfig, ModelCheckpoint

from gaccum_ms import (
    AccumulationScheduler,
    CountMask,
    FlushAccumulation,
    GradAccumulator,
    TrainOneStepWithGradAccumulationCell,
    WindowMonitor,
    resume,
)
from tests.ranks.cases import NotedAllReduce, error_of, named, set_up
from tests.support.reference import Regression, as_numpy, batches, make_step, vector
from tests.support.two_ranks import Results

RATE = 0.05
SCALE = 2.0**20

Batch = tuple[np.ndarray, ...]


def momentum(weights: Sequence[ms.Parameter], rate: float = RATE) -> nn.Momentum:
    return nn.Momentum(weights, rate, 0.9)


def step_of(**options: Any) -> TrainOneStepWithGradAccumulationCell:
    return make_step(Regression(), momentum, **{"micro_size": 2, **options})


def state(optimizer: nn.Momentum) -> Batch:
    """Weights, moments and the number of updates, each in one vector."""
    weights, moments = (vector(many) for many in (optimizer.parameters, optimizer.moments))
    return weights, moments, as_numpy(optimizer.global_step)


# -- calls of the step -------------------------------------------------------------------------------------------------


class Calls(NamedTuple):
    """Steps that are called batch by batch."""

    sizes: tuple[Sequence[int], Sequence[int]]  # samples of each rank's batches
    mode: str = "pynative"
    gradients_mean: bool = True
    masked: bool = False
    steps: int = 2
    poisoned: int | None = None  # the batch of rank 1 that overflows; with a loss scale then
    max_norm: float | None = None
    split: bool = False  # a function as `split=`

    def scale(self) -> nn.Cell | None:
        return None if self.poisoned is None else nn.DynamicLossScaleUpdateCell(SCALE, 2, 1000)

    def data(self, rank: int) -> list[Batch]:
        """A rank's batches. Masked ones of rank 0 are light and those of rank 1 heavy, and some weigh nothing."""
        result = []
        random = np.random.default_rng(50 + rank)
        for number, size in enumerate(self.sizes[rank]):
            x, y = batches(size, 1, seed=100 * rank + number)[0]
            if number == self.poisoned and rank == 1:
                x[0, 0] = np.inf
            mask = random.uniform(0.01, 0.1, size) if rank == 0 else random.uniform(1, 9, size)
            if number % 4 == rank:
                mask[: 3 if self.split else size] = 0
            result.append((x, y, mask.astype(np.float32)) if self.masked else (x, y))
        return result


FEW = ([5] * 4, [5] * 4)
RAGGED = ([5, 3, 7, 2], [2, 6, 4, 3])
SPLIT = ([6] * 4, [10] * 4)

CALLS = {
    "eager, sum over ranks": Calls(RAGGED, gradients_mean=False),
    "overflow, clipped, graph": Calls(FEW, "graph", poisoned=2, max_norm=0.2),
    "split, eager, sum over ranks": Calls(SPLIT, gradients_mean=False, split=True),
    "split, count, graph": Calls(SPLIT, "graph", masked=True, split=True),
}

ACCUMULATOR_CALLS = {
    "accumulator, overflow, clipped": Calls(FEW, poisoned=2, max_norm=0.2),
    "accumulator, samples, sum over ranks": Calls(RAGGED, gradients_mean=False),
    # rank 1's last call is one of flush() with nothing to add; rank 0's window has two batches
    "accumulator, count, sum over ranks, flush": Calls(([5] * 5, [5] * 3), gradients_mean=False, masked=True, steps=3),
}


def halves(*batch):
    return [tuple(one[:3] for one in batch), tuple(one[3:] for one in batch)]


def many(*batch):
    """A micro-batch of one sample, then micro-batches of three."""
    return [tuple(one[start : start + 3] for one in batch) for start in (1, 4, 7)] + [tuple(one[:1] for one in batch)]


class Log:
    """The visible state before the first call and after each call."""

    def __init__(self, optimizer: nn.Momentum, step: Any, noted: Sequence[NotedAllReduce]) -> None:
        self.optimizer, self.step, self.noted = optimizer, step, noted
        self.rows: list[dict[str, Any]] = []
        self.look()

    def look(self) -> None:
        seen = dict(zip(("weights", "moments", "global_step"), state(self.optimizer), strict=True))
        seen["updates"] = as_numpy(self.step.update_count)
        seen["reductions"] = sum(len(one.sizes) for one in self.noted)
        if hasattr(self.step, "scale_sense"):
            seen["scale"] = as_numpy(self.step.scale_sense).ravel()[0]
        self.rows.append(seen)

    def arrays(self, name: str) -> Results:
        return named(name, {key: np.stack([row[key] for row in self.rows]) for key in self.rows[0]})


def play(name: str, rank: int) -> Results:
    calls = CALLS[name]
    set_up(calls.mode, calls.gradients_mean)
    options: dict[str, Any] = {"count": CountMask()} if calls.masked else {}
    if calls.split:
        options |= {"split": (halves, many)[rank], "micro_size": None}
    step = step_of(scale_sense=calls.scale(), max_grad_norm=calls.max_norm, accumulation_steps=calls.steps, **options)
    reducers = (step.window.ledger.sum_over_ranks.reducer, step.grad_reducer)
    log = Log(step.optimizer, step, [NotedAllReduce(one) for one in reducers if calls.mode == "pynative"])
    for batch in calls.data(rank):
        step(*map(Tensor, batch))
        log.look()
    return log.arrays(name)


def play_accumulator(name: str, rank: int) -> Results:
    """The same in a hand-written loop."""
    calls = ACCUMULATOR_CALLS[name]
    set_up(calls.mode, calls.gradients_mean)
    network = Regression()
    optimizer = momentum(network.trainable_params())
    options = {"max_grad_norm": calls.max_norm, "scale_sense": calls.scale(), "jit": False}  # collectives are counted
    accumulator = GradAccumulator(optimizer, calls.steps, **options)

    def forward(*batch):
        return accumulator.scale(network(*batch))

    if len({*calls.sizes[0], *calls.sizes[1]}) > 1:  # by the samples, which differ
        grad_fn = accumulator.value_and_grad(forward)
    else:
        grad_fn = ms.value_and_grad(forward, None, optimizer.parameters)
    log = Log(optimizer, accumulator, [NotedAllReduce(accumulator.ledger.sum_over_ranks.reducer)])
    for batch in calls.data(rank):
        count = (float(batch[2].sum()),) if calls.masked else ()
        if calls.masked and not count[0]:
            batch = (*batch[:2], np.ones_like(batch[2]))  # the gradient is not NaN then; its count is 0
        _, gradients = grad_fn(*map(Tensor, batch))
        accumulator(gradients, *count)
        log.look()
    if len(set(map(len, calls.sizes))) > 1:
        assert accumulator.flush()
        log.look()
    return log.arrays(name)


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

    def steps(self, epoch: int) -> int:
        return self.schedule[epoch] if self.schedule else STEPS


TRAININGS = {
    "5 and 4: 1 and 0 in the last window, and rank 1 has none open": Training((5, 4), flushes=2),
    "2 and 3: rank 0 is shorter, no window is full": Training((2, 3), 2),
    "9 and 7, scheduled": Training((9, 7), 3, {0: 4, 1: 2, 2: 3}),
    # A stop before the epoch's end leaves ranks with fewer batches than they announced.
    "9 and 7, stopped after 8": Training((9, 7), stop=8),
}

REFUSED: dict[str, list[Callback]] = {
    "no flush": [],
    "schedule by updates": [FlushAccumulation(), AccumulationScheduler(lambda updates: 2 + updates // 4)],
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
        self.weights.append(state(run_context.original_args().train_network.optimizer)[0])


def as_data_set(data: Sequence[Batch]) -> Any:
    columns = tuple(np.concatenate(column) for column in zip(*data, strict=True))
    return ms.dataset.NumpySlicesDataset(columns, shuffle=False).batch(SAMPLES)


def train_models(rank: int) -> Results:
    set_up()
    step, results = step_of(accumulation_steps=STEPS), {}
    for name, training in TRAININGS.items():
        watch, monitor = Watch(training.stop), WindowMonitor()
        callbacks = [watch, monitor, *(FlushAccumulation() for _ in range(training.flushes))]
        if training.schedule:
            callbacks.append(AccumulationScheduler(training.schedule))
        before = int(step.update_count.asnumpy())
        ms.Model(step).train(training.epochs, as_data_set(training.data(rank)), callbacks=callbacks)
        step.set_accumulation_steps(STEPS)
        rows = [(record.update, record.batches, len(record.losses), record.count) for record in monitor.records]
        found = {"weights": watch.weights, "updates": int(step.update_count.asnumpy()) - before}
        results |= named(name, found | {"batches": len(watch.seen), "records": rows})
    return results


def refuse_to_train(rank: int) -> Results:
    set_up()
    step, results = step_of(accumulation_steps=STEPS), {}
    for name, callbacks in REFUSED.items():
        data_set, before = as_data_set(Training((3, 2)).data(rank)), state(step.optimizer)
        message = error_of(lambda: ms.Model(step).train(1, data_set, callbacks=callbacks))  # noqa: B023
        changed = not all(map(np.array_equal, before, state(step.optimizer)))
        results |= named(name, {"message": message, "changed": changed, "batch_count": as_numpy(step.batch_count)})
    return results


def save_under_the_same_names(out: Path, rank: int) -> Results:
    """Ranks that save in one folder, and then in folders of their own."""
    set_up()
    step, messages = step_of(accumulation_steps=STEPS), []
    for folder in ("all", str(rank)):
        saver = ModelCheckpoint("net", str(out / folder), CheckpointConfig(1, keep_checkpoint_max=2))
        data_set = as_data_set(Training((2, 2)).data(rank))
        messages.append(error_of(lambda: ms.Model(step).train(3, data_set, callbacks=[saver])))  # noqa: B023
    return named("saving", {"messages": messages, "batch_count": as_numpy(step.batch_count)})


# -- checkpoints -------------------------------------------------------------------------------------------------------

BATCH, EPOCH, EPOCHS = 3, 10, 2  # samples of a batch, batches of a rank's epoch
SAVED = 6  # batches of each rank between checkpoints: in mid-window, between windows, in mid-window of epoch 2


def samples() -> Batch:
    """The data of all ranks. The masks of odd samples, which rank 1 of two gets, are heavy."""
    x, y = batches(2 * BATCH * EPOCH, 1, seed=9)[0]
    random = np.random.default_rng(10)
    mask = random.uniform(0.01, 0.1, len(x)) * np.where(np.arange(len(x)) % 2, 90, 1)
    return x, y, mask.astype(np.float32)


def counting_step() -> TrainOneStepWithGradAccumulationCell:
    return step_of(accumulation_steps=STEPS, count=CountMask())


def file_of(out: Path, saved: int, rank: int) -> str:
    """The checkpoint of a rank after `saved` of its batches."""
    return str(out / f"run-{rank}" / f"run-{(saved - 1) // EPOCH + 1}_{(saved - 1) % EPOCH + 1}.ckpt")


def train_on(name: str, step: Any, rank: int, finished: Callable[[Any], int], *callbacks: Callback) -> Results:
    """Train to the end of the last epoch, where an incomplete window updates too. ``finished(data_set)`` is the number
    of epochs before."""
    data_set = ms.dataset.NumpySlicesDataset(samples(), shuffle=False, num_shards=2, shard_id=rank).batch(BATCH)
    watch, epoch = Watch(), finished(data_set)
    callbacks = [watch, FlushAccumulation(each_epoch=False), *callbacks]
    ms.Model(step).train(EPOCHS, data_set, callbacks=callbacks, initial_epoch=epoch)
    weights, moments, _ = state(step.optimizer)
    updates = as_numpy(step.update_count)
    return named(name, {"weights": weights, "moments": moments, "updates": updates, "seen": watch.seen})


def train_and_save(out: Path, rank: int) -> Results:
    """Train without an interruption, and save checkpoints."""
    set_up()
    saver = ModelCheckpoint("run", str(out / f"run-{rank}"), CheckpointConfig(save_checkpoint_steps=SAVED))
    return train_on("uninterrupted", counting_step(), rank, lambda data_set: 0, saver)


# The checkpoint's batches, and the ranks whose files each rank reads.
RESUMED: dict[str, tuple[int, Callable[[int], tuple[int, ...]]]] = {
    "in mid-window": (SAVED, lambda rank: (rank,)),
    "in mid-window of the second epoch": (3 * SAVED, lambda rank: (rank,)),
    "all files, in any order": (SAVED, lambda rank: (1, 0)),
    "between windows, rank 0's file": (2 * SAVED, lambda rank: (0,)),
}


def resume_on_ranks(out: Path, rank: int) -> Results:
    set_up()
    step, results = counting_step(), {}  # the first resume is of a step that has not run
    for name, (saved, whose) in RESUMED.items():
        files = [file_of(out, saved, one) for one in whose(rank)]
        results |= train_on(name, step, rank, lambda data_set: resume(step, files, data_set))  # noqa: B023
    before = state(step.optimizer)
    message = error_of(lambda: resume(step, file_of(out, SAVED, 0)))
    changed = not all(map(np.array_equal, before, state(step.optimizer)))
    return results | named("rank 0's file", {"message": message, "changed": changed})


def load_plainly(out: Path, rank: int) -> Results:
    """Load rank 0's files on both ranks by MindSpore's own functions, in mid-window and between windows."""
    set_up()
    results = {}
    batch = [Tensor(column[:BATCH]) for column in samples()]
    for saved in (SAVED, 2 * SAVED):
        step = counting_step()
        ms.load_param_into_net(step, ms.load_checkpoint(file_of(out, saved, 0)))
        message = error_of(lambda: step(*batch))  # noqa: B023
        results |= named(f"plain {saved}", {"message": message, "position": as_numpy(step.window_position)})
    return results


# -- all cases ---------------------------------------------------------------------------------------------------------


def as_case(task: Callable[..., Results], *arguments: Any, files: bool = False) -> Callable[[Path], Results]:
    return lambda out: task(*([out] if files else []), *arguments, get_rank())


CASES: dict[str, Callable[[Path], Results]] = {
    **{name: as_case(play, name) for name in CALLS},
    **{name: as_case(play_accumulator, name) for name in ACCUMULATOR_CALLS},
    **dict.fromkeys(TRAININGS, as_case(train_models)),
    **dict.fromkeys(REFUSED, as_case(refuse_to_train)),
    "saving": as_case(save_under_the_same_names, files=True),
    **dict.fromkeys((f"plain {saved}" for saved in (SAVED, 2 * SAVED)), as_case(load_plainly, files=True)),
    "uninterrupted": as_case(train_and_save, files=True),
    **dict.fromkeys([*RESUMED, "rank 0's file"], as_case(resume_on_ranks, files=True)),
}
