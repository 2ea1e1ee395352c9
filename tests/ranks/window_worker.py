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
    GradAccumulationCell,
    GradAccumulator,
    TrainOneStepWithGradAccumulationCell,
    WindowMonitor,
    resume,
)
from tests.ranks.distributed_worker import NotedAllReduce
from tests.support import window_oracle
from tests.support.modes import MODES, eagerly
from tests.support.reference import Regression, as_numpy, batches, vector
from tests.support.state import everything
from tests.support.two_ranks import Results

RATE, MOMENTUM = 0.05, 0.9
SCALE = 2.0**20

Batch = tuple[np.ndarray, ...]


def momentum(loss_cell: nn.Cell, rate: float = RATE) -> nn.Momentum:
    return nn.Momentum(loss_cell.trainable_params(), rate, MOMENTUM)


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
    steps: int = 3
    poisoned: int | None = None  # the batch of rank 1 that overflows; with a loss scale then
    max_norm: float | None = None

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
                mask[:] = 0
            result.append((x, y, mask.astype(np.float32)) if self.masked else (x, y))
        return result


SAME = ([5] * 9, [5] * 9)
FEW = ([5] * 4, [5] * 4)
RAGGED = ([5, 3, 7, 2], [2, 6, 4, 3])

CALLS = {
    "eager, sum over ranks": Calls(RAGGED, gradients_mean=False, steps=2),
    "overflow, clipped": Calls(SAME, poisoned=4, max_norm=0.2),
    "overflow, clipped, graph": Calls(SAME, "graph", poisoned=4, max_norm=0.2),
}

ACCUMULATOR_CALLS = {
    "accumulator, overflow, clipped": Calls(FEW, steps=2, poisoned=2, max_norm=0.2),
    "accumulator, samples, sum over ranks": Calls(RAGGED, gradients_mean=False, steps=2),
    # rank 1's last call is one of flush() with nothing to add; rank 0's window has two batches
    "accumulator, count, sum over ranks, flush": Calls(([5] * 5, [5] * 3), gradients_mean=False, masked=True),
}


def make_step(calls: Calls, micro_size: int = 2) -> Any:
    loss_cell = Regression()
    options = {"count": CountMask() if calls.masked else None, "max_grad_norm": calls.max_norm}
    cell = GradAccumulationCell(loss_cell, micro_size, accumulation_steps=calls.steps, **options)
    return TrainOneStepWithGradAccumulationCell(cell, momentum(loss_cell), calls.scale()).set_train()


def set_up(mode: str, gradients_mean: bool = True) -> None:
    ms.set_context(mode=MODES[mode])
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=gradients_mean)


class Log:
    """The visible state before the first call and after each call."""

    def __init__(self, seen: Callable[[], dict[str, Any]]) -> None:
        self.seen = seen
        self.rows = [seen()]

    def look(self) -> None:
        self.rows.append(self.seen())

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        return {f"{name}/{key}": np.stack([row[key] for row in self.rows]) for key in self.rows[0]}


def look(optimizer: nn.Momentum, step: Any) -> dict[str, Any]:
    seen = dict(zip(("weights", "moments", "global_step"), state(optimizer), strict=True))
    seen["updates"] = as_numpy(step.update_count)
    if hasattr(step, "scale_sense"):
        seen["scale"] = as_numpy(step.scale_sense).ravel()[0]
    return seen


def play(calls: Calls, rank: int) -> Log:
    set_up(calls.mode, calls.gradients_mean)
    step = make_step(calls)
    reducers = (step.window.ledger.sum_over_ranks.reducer, step.grad_reducer)
    noted = [NotedAllReduce(one) for one in reducers if calls.mode == "pynative"]
    log = Log(lambda: look(step.optimizer, step) | {"reductions": sum(len(one.sizes) for one in noted)})
    for batch in calls.data(rank):
        step(*map(Tensor, batch))
        log.look()
    return log


def play_accumulator(calls: Calls, rank: int) -> Log:
    """The same in a hand-written loop."""
    set_up(calls.mode, calls.gradients_mean)
    loss_cell = Regression()
    optimizer = momentum(loss_cell)
    options = {"max_grad_norm": calls.max_norm, "scale_sense": calls.scale(), "jit": False}  # collectives are counted
    accumulator = GradAccumulator(optimizer, calls.steps, **options)
    reducers = (accumulator.ledger.sum_over_ranks.reducer,)
    noted = [NotedAllReduce(one) for one in reducers if calls.mode == "pynative"]

    def forward(*batch):
        return accumulator.scale(loss_cell(*batch))

    if len({*calls.sizes[0], *calls.sizes[1]}) > 1:  # by the samples, which differ
        grad_fn = accumulator.value_and_grad(forward)
    else:
        grad_fn = ms.value_and_grad(forward, None, optimizer.parameters)
    log = Log(lambda: look(optimizer, accumulator) | {"reductions": sum(len(one.sizes) for one in noted)})
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
    return log


# -- ms.Model, with different numbers of batches on the ranks ----------------------------------------------------------

SAMPLES = 4
STEPS = 4  # of all models below


class Training(NamedTuple):
    """One call of model.train, which continues the one before."""

    batches: tuple[int, int]
    epochs: int = 1
    schedule: dict[int, int] | None = None
    stop: int | None = None  # batches of the first epoch, on each rank that has as many

    def data(self, rank: int) -> list[Batch]:
        return batches(SAMPLES, self.batches[rank], seed=1000 * sum(self.batches) + rank)

    def steps(self, epoch: int) -> int:
        return self.schedule[epoch] if self.schedule else STEPS


TRAININGS = {
    "9 and 7": Training((9, 7), 2),
    "8 and 2": Training((8, 2), 2),
    "5 and 4: 1 and 0 in the last window, and rank 1 has none open": Training((5, 4)),
    "2 and 3: rank 0 is shorter, no window is full": Training((2, 3), 2),
    "9 and 7, scheduled": Training((9, 7), 3, {0: 4, 1: 2, 2: 3}),
    # A stop before the epoch's end leaves ranks with fewer batches than they announced.
    "9 and 7, stopped after 5": Training((9, 7), 2, stop=5),
    "9 and 7, stopped after 8": Training((9, 7), stop=8),
}

REFUSED: dict[str, tuple[bool, list[Callback]]] = {  # whether accumulation_steps is set, and callbacks
    "no flush": (True, []),
    "flush of the last epoch alone": (True, [FlushAccumulation(each_epoch=False)]),
    "no accumulation_steps": (False, [FlushAccumulation()]),
    "schedule by updates": (True, [FlushAccumulation(), AccumulationScheduler(lambda updates: 2 + updates // 4)]),
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
        self.weights.append(state(run_context.original_args().optimizer)[0])


def make_model(masked: bool = False, **options: Any) -> ms.Model:
    loss_cell = Regression()
    cell = GradAccumulationCell(loss_cell, 2, count=CountMask() if masked else None, **options)
    return ms.Model(cell, optimizer=momentum(loss_cell))


def as_data_set(data: Sequence[Batch]) -> Any:
    columns = tuple(np.concatenate(column) for column in zip(*data, strict=True))
    return ms.dataset.NumpySlicesDataset(columns, shuffle=False).batch(SAMPLES)


def refusal(action: Callable[[], Any]) -> str:
    """The message of the ValueError; empty if there was none."""
    try:
        action()
    except ValueError as error:
        return str(error)
    return ""


def train_models(rank: int) -> dict[str, np.ndarray]:
    set_up("pynative")
    model = make_model(accumulation_steps=STEPS)
    step, results = model.train_network, {}
    for name, training in TRAININGS.items():
        watch, monitor = Watch(training.stop), WindowMonitor()
        # Two FlushAccumulation callbacks must not flush twice as often.
        callbacks = [watch, monitor, *(FlushAccumulation() for _ in range(1 + (name == "8 and 2")))]
        if training.schedule:
            callbacks.append(AccumulationScheduler(training.schedule))
        before = int(step.update_count.asnumpy())
        model.train(training.epochs, as_data_set(training.data(rank)), callbacks=callbacks)
        step.set_accumulation_steps(STEPS)
        results[f"{name}/weights"] = np.stack(watch.weights)
        results[f"{name}/updates"] = int(step.update_count.asnumpy()) - before
        results[f"{name}/batches"] = np.array(len(watch.seen))
        rows = [(record.update, record.batches, len(record.losses), record.count) for record in monitor.records]
        results[f"{name}/records"] = np.array(rows)
    return results


def refuse_to_train(rank: int) -> dict[str, np.ndarray]:
    set_up("pynative")
    results = {}
    for name, (spans, callbacks) in REFUSED.items():
        model = make_model(**({"accumulation_steps": STEPS} if spans else {}))
        before = state(model.train_network.optimizer)
        data_set = as_data_set(Training((3, 2)).data(rank))
        results[f"{name}/message"] = np.array(refusal(lambda: model.train(1, data_set, callbacks=callbacks)))  # noqa: B023
        after = state(model.train_network.optimizer)
        results[f"{name}/changed"] = np.array(not all(map(np.array_equal, before, after)))
        results[f"{name}/batch_count"] = as_numpy(model.train_network.batch_count)
    return results


def accumulator_by_hand(steps: int = 4) -> tuple[GradAccumulator, ms.Parameter, Any]:
    """An accumulator without counts for a weight of 0 and SGD with rate 1, and a call that adds a gradient."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    weight = ms.Parameter(Tensor([0.0], ms.float32), name="weight")
    accumulator = GradAccumulator(nn.SGD([weight], 1.0), steps, jit=False)
    return accumulator, weight, lambda gradient: accumulator((Tensor([gradient], ms.float32),))


def accumulator_file(out: Path, who: int | str) -> str:
    return str(out / f"accumulator-{who}.ckpt")


def save_and_resume_accumulators(out: Path, rank: int) -> Results:
    """Ranks save in the middle of a window, and finish one that one process has begun. Ranks are summed."""
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=False)
    accumulator, weight, add = accumulator_by_hand()
    for number in range(2):
        add(1.0 + rank + 2 * number)  # 1 and 3, 2 and 4
    ms.save_checkpoint(accumulator, accumulator_file(out, rank))
    results = {}
    for name, more in (("flush", ()), ("batches", (6.0, 8.0))):
        accumulator, weight, add = accumulator_by_hand()
        resume(accumulator, accumulator_file(out, "alone"))
        for gradient in more:
            add(gradient)
        accumulator.flush()
        results[f"accumulators on other ranks/{name}"] = weight.asnumpy()
    return results


def flush_nothing(rank: int) -> Results:
    """Flushes when no rank has batches, with `min_count` , which makes updates of windows that count nothing."""
    set_up("pynative")
    results = {}
    cell = GradAccumulationCell(
        window_oracle.Masked(), 2, count=CountMask(), min_count=1.0, accumulation_steps=2, max_grad_norm=1.0
    )
    step = TrainOneStepWithGradAccumulationCell(cell, momentum(cell))
    batch = [Tensor(np.full(4, 1.0 + rank), ms.float32)] * 3
    results["flush of nothing/first"] = np.array(step.flush())
    step(*batch)
    step(*batch)
    before = everything(step)
    results["flush of nothing/then"] = np.array(step.flush())
    after = everything(step)
    results["flush of nothing/changed"] = np.array([name for name in after if (after[name] != before[name]).any()], str)
    step(*batch)
    results["flush of nothing/last"] = np.array(step.flush())
    return results


SAVING = {  # the folder and prefix in which a rank saves
    "one folder": lambda rank: ("all", "net"),
    "folders of their own": lambda rank: (str(rank), "net"),
    "prefixes of their own": lambda rank: ("all", f"net{rank}"),
    "rank 0 alone": lambda rank: ("all", "net") if rank == 0 else None,
}


def save_checkpoints(out: Path, rank: int) -> Results:
    set_up("pynative")
    model = make_model(accumulation_steps=STEPS)
    results = {}
    for name, place in SAVING.items():
        savers = []
        if place(rank) is not None:
            folder, prefix = place(rank)
            savers.append(ModelCheckpoint(prefix, str(out / name / folder), CheckpointConfig(1, keep_checkpoint_max=2)))
        data_set = as_data_set(Training((2, 2)).data(rank))
        results[f"saving: {name}/message"] = np.array(refusal(lambda: model.train(3, data_set, callbacks=savers)))  # noqa: B023
        results[f"saving: {name}/batch_count"] = as_numpy(model.train_network.batch_count)
    return results


# -- records -----------------------------------------------------------------------------------------------------------

RECORDED: dict[str, tuple[type[nn.Cell], dict[str, Any]]] = {  # windows with fields that ranks share, or do not share
    "counts": (window_oracle.Masked, {"count": CountMask()}),
    "dropped": (window_oracle.Mean, {"overflow": "drop_micro_batch"}),
    "several batches": (window_oracle.Masked, {"count": CountMask(), "accumulation_steps": 2}),
    "two losses": (window_oracle.MaskedAndMean, {"count": (CountMask(), None), "max_grad_norm": 0.1}),
}


def recorded_data(name: str, rank: int) -> list[Batch]:
    """Two batches. In "dropped", a micro-batch of rank 1 is infinite, and must be dropped."""
    random = np.random.default_rng(70 + rank)
    result = [tuple(random.uniform(0.5, 1.5, (3, 4)).astype(np.float32)) for _ in range(2)]
    if name == "dropped" and rank == 1:
        result[1][0][0] = np.inf
    return result


def record_fields(rank: int) -> dict[str, np.ndarray]:
    set_up("pynative")
    results = {}
    for name, (network, options) in RECORDED.items():
        cell = GradAccumulationCell(network(), 2, **options)
        monitor = WindowMonitor()
        model = ms.Model(cell, optimizer=nn.SGD(cell.trainable_params(), RATE))
        data = ms.dataset.GeneratorDataset(recorded_data(name, rank), ["x", "y", "mask"], shuffle=False)
        model.train(1, data, callbacks=[monitor])
        for field in window_oracle.FIELDS:
            rows = [getattr(record, field) for record in monitor.records]
            results[f"records of {name}/{field}"] = np.array(rows, np.float64)  # None is NaN
    return results


# -- checkpoints -------------------------------------------------------------------------------------------------------

BATCH, EPOCH, EPOCHS = 3, 20, 2  # samples of a batch, batches of an epoch of all ranks together
SAVED = 6  # batches of each rank between checkpoints: in mid-window, between windows, in mid-window of epoch 2
SAVED_ALONE = (5, 6)  # batches of one process before its checkpoints


def samples() -> Batch:
    """The data of all ranks. The masks of odd samples, which rank 1 of two gets, are heavy."""
    x, y = batches(BATCH * EPOCH, 1, seed=9)[0]
    random = np.random.default_rng(10)
    mask = random.uniform(0.01, 0.1, len(x)) * np.where(np.arange(len(x)) % 2, 90, 1)
    return x, y, mask.astype(np.float32)


def share(rank: int = 0, ranks: int = 1) -> Any:
    return ms.dataset.NumpySlicesDataset(samples(), shuffle=False, num_shards=ranks, shard_id=rank).batch(BATCH)


def file_of(out: Path, saved: int, who: int | str) -> str:
    """The checkpoint of a rank, or of the process "alone", after `saved` of its batches."""
    size = EPOCH if who == "alone" else EPOCH // 2
    return str(out / f"run-{who}" / f"run-{(saved - 1) // size + 1}_{(saved - 1) % size + 1}.ckpt")


def train_and_save(out: Path, rank: int) -> dict[str, np.ndarray]:
    """Train without an interruption, and save checkpoints."""
    set_up("graph")
    model, watch = make_model(True, accumulation_steps=STEPS), Watch()
    saver = ModelCheckpoint("run", str(out / f"run-{rank}"), CheckpointConfig(save_checkpoint_steps=SAVED))
    model.train(EPOCHS, share(rank, 2), callbacks=[watch, saver])
    return finished("uninterrupted", model, watch)


@eagerly()
def save_alone(out: Path) -> None:
    """One process trains, and saves in mid-window."""
    step = make_model(True, accumulation_steps=STEPS).train_network
    (out / "run-alone").mkdir()
    for number, batch in zip(range(1, SAVED_ALONE[-1] + 1), share().create_tuple_iterator(), strict=False):
        step(*batch)
        if number in SAVED_ALONE:
            ms.save_checkpoint(step, file_of(out, number, "alone"))


def finished(name: str, model: ms.Model, watch: Watch) -> dict[str, np.ndarray]:
    weights, moments, _ = state(model.train_network.optimizer)
    updates = as_numpy(model.train_network.update_count)
    values = {"weights": weights, "moments": moments, "updates": updates, "seen": np.stack(watch.seen)}
    return {f"{name}/{key}": value for key, value in values.items()}


def go_on(name: str, model: ms.Model, files: Any, data_set: Any) -> dict[str, np.ndarray]:
    """Resume and train to the end of the last epoch, where an incomplete window updates too."""
    watch = Watch()
    epoch = resume(model, files, data_set)
    model.train(EPOCHS, data_set, callbacks=[watch, FlushAccumulation(each_epoch=False)], initial_epoch=epoch)
    return finished(name, model, watch)


def resume_on_ranks(out: Path, rank: int) -> dict[str, np.ndarray]:
    set_up("graph")
    model = make_model(True, accumulation_steps=STEPS)  # the first resume is of a step that has not run
    alone = [file_of(out, saved, "alone") for saved in SAVED_ALONE]
    files = {
        **{f"after {saved}": file_of(out, saved, rank) for saved in (SAVED, 2 * SAVED, 3 * SAVED)},
        "all files": [file_of(out, SAVED, one) for one in (1, 0)],
        "between windows, rank 0's file": file_of(out, 2 * SAVED, 0),
        "from one process": alone[1],
    }
    results = {}
    for name, file in files.items():
        results |= go_on(name, model, file, share(rank, 2))
    for name, file, data_set in (
        ("rank 0's file", file_of(out, SAVED, 0), None),
        ("5 batches", alone[0], share(rank, 2)),
    ):
        before = state(model.train_network.optimizer)
        results[f"{name}/message"] = np.array(refusal(lambda: resume(model, file, data_set)))  # noqa: B023
        if name == "rank 0's file" and rank == 0:
            continue  # rank 0 accepts its own file
        after = state(model.train_network.optimizer)
        results[f"{name}/changed"] = np.array(not all(map(np.array_equal, before, after)))
    return results


def load_plainly(out: Path, rank: int) -> dict[str, np.ndarray]:
    """Load rank 0's files on both ranks by MindSpore's own functions, in mid-window and between windows."""
    set_up("pynative")
    results = {}
    batch = tuple(column[:BATCH] for column in samples())
    for saved in (SAVED, 2 * SAVED):
        step = make_model(True, accumulation_steps=STEPS).train_network
        ms.load_param_into_net(step, ms.load_checkpoint(file_of(out, saved, 0)))
        message = refusal(lambda: step(*map(Tensor, batch)))  # noqa: B023
        results[f"plain {saved}/message"] = np.array(message)
        results[f"plain {saved}/position"] = as_numpy(step.window_position)
    return results


# -- all cases ---------------------------------------------------------------------------------------------------------


RESUMED = [f"after {saved}" for saved in (SAVED, 2 * SAVED, 3 * SAVED)]
RESUMED += ["all files", "between windows, rank 0's file", "from one process", "rank 0's file", "5 batches"]


def as_case(task: Callable[[int], Results]) -> Callable[[Path], Results]:
    return lambda out: task(get_rank())


def as_case_with_files(task: Callable[[Path, int], Results]) -> Callable[[Path], Results]:
    return lambda out: task(out, get_rank())


CASES: dict[str, Callable[[Path], Results]] = {
    **{name: as_case(lambda rank, n=name: play(CALLS[n], rank).arrays(n)) for name in CALLS},
    **{
        name: as_case(lambda rank, n=name: play_accumulator(ACCUMULATOR_CALLS[n], rank).arrays(n))
        for name in ACCUMULATOR_CALLS
    },
    "accumulators on other ranks": as_case_with_files(save_and_resume_accumulators),
    "flush of nothing": as_case(flush_nothing),
    **dict.fromkeys(TRAININGS, as_case(train_models)),
    **dict.fromkeys((f"records of {name}" for name in RECORDED), as_case(record_fields)),
    **dict.fromkeys(REFUSED, as_case(refuse_to_train)),
    **dict.fromkeys((f"saving: {name}" for name in SAVING), as_case_with_files(save_checkpoints)),
    **dict.fromkeys((f"plain {saved}" for saved in (SAVED, 2 * SAVED)), as_case_with_files(load_plainly)),
    "uninterrupted": as_case_with_files(train_and_save),
    **dict.fromkeys(RESUMED, as_case_with_files(resume_on_ranks)),
}
