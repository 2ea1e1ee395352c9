"""What a rank of the sharding tests runs (support/ranks.py): it trains with ShardedOptimizer and without."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn, ops, train
from mindspore.communication import get_group_size, get_rank
from support.reference import CLASSES, FEATURES, Classifier, _decayed, as_numpy, batches
from support.two_ranks import Results

from gaccum_ms import (
    FlushAccumulation,
    GradAccumulationCell,
    GradAccumulator,
    ShardedOptimizer,
    TrainOneStepWithGradAccumulationCell,
    UpdateCheckpoint,
    resume,
)
from gaccum_ms.distributed import all_reduce as fused_reduction
from gaccum_ms.distributed import layout as shards
from gaccum_ms.distributed.sharded_optimizer import PART
from gaccum_ms.learning_rate import current_learning_rate, multiply_learning_rate

PER_RANK = 6
JOINED = 24  # samples of a batch on all ranks together, where numbers of ranks are compared


class NormedNet(Classifier):
    """LayerNorm's `gamma` and `beta` are what MindSpore's optimizers do not decay, by their names."""

    def __init__(self, width: int = 7):
        super().__init__()
        self.hidden = nn.Dense(FEATURES, width)
        self.norm = nn.LayerNorm((width,))
        self.out = nn.Dense(width, CLASSES)

    def logits(self, x):
        return self.out(self.norm(ops.tanh(self.hidden(x))))


def make_network(width: int = 7) -> NormedNet:
    network, random = NormedNet(width), np.random.default_rng(5)
    for parameter in network.get_parameters():
        parameter.set_data(ms.Tensor(random.normal(size=parameter.shape), ms.float32))
    return network


class TrustRatio(nn.Optimizer):
    """Looks at whole parameters, as Lamb and LARS do, which MindSpore has no CPU kernels for."""

    def __init__(self, params, learning_rate=0.1, weight_decay=0.0):
        super().__init__(learning_rate, params, weight_decay)
        self.moments = self._parameters.clone(prefix="moments", init="zeros")

    @ms.jit
    def construct(self, gradients):
        gradients = self.decay_weight(gradients)
        rates = self.get_lr()
        self.assignadd(self.global_step, self.global_step_increase_tensor)
        done = ()
        for index in range(len(self._parameters)):
            weight = self._parameters[index]
            moment = 0.9 * self.moments[index] + gradients[index]
            ratio = ops.sqrt(ops.reduce_sum(weight * weight)) / (1 + ops.sqrt(ops.reduce_sum(moment * moment)))
            rate = rates[index] if self.is_group_lr else rates
            done = (*done, ops.assign(self.moments[index], moment), ops.assign(weight, weight - rate * ratio * moment))
        return done


# Name: the class, its arguments, and how the parameters are grouped.
OPTIMIZERS: dict[str, tuple] = {
    "sgd": (nn.SGD, {"learning_rate": nn.CosineDecayLR(0.01, 0.1, 8)}, list),
    "momentum": (
        nn.Momentum,
        {"learning_rate": 0.05, "momentum": 0.9, "weight_decay": 0.1},
        list,
    ),
    "adam": (nn.Adam, {"learning_rate": [0.02, 0.01, 0.02, 0.03] * 2, "weight_decay": 0.1}, list),
    "adam_weight_decay": (nn.AdamWeightDecay, {"learning_rate": 0.01, "weight_decay": 0.1}, _decayed),
    "asgd": (nn.ASGD, {"learning_rate": 0.05}, list),
    "adafactor": (nn.AdaFactor, {"learning_rate": None}, list),
    "trust_ratio": (TrustRatio, {"learning_rate": 0.02, "weight_decay": 0.1}, _decayed),
}


def make_optimizer(name: str, network: nn.Cell, sharded: bool, **options) -> nn.Optimizer:
    kind, arguments, grouped = OPTIMIZERS[name]
    params = grouped(network.trainable_params())
    return ShardedOptimizer(kind, params, **arguments, **options) if sharded else kind(params, **arguments)


def state_of(network: nn.Cell, optimizer: nn.Optimizer) -> dict[str, np.ndarray]:
    """Weights and the whole state, by name."""
    if isinstance(optimizer, ShardedOptimizer):
        with optimizer.whole_state():
            return state_of(network, optimizer.inner)
    return {one.name: as_numpy(one) for one in (*network.get_parameters(), *optimizer.get_parameters())}


Break = Callable[[ShardedOptimizer, TrainOneStepWithGradAccumulationCell], None]


class Trainer:
    """Trains this rank's share of the same batches, and keeps the result under a name."""

    def __init__(self) -> None:
        self.rank, self.ranks = get_rank(), get_group_size()
        self.results: dict[str, np.ndarray] = {}

    def data(self, updates: int = 4, seed: int = 3) -> list[list[ms.Tensor]]:
        shares = batches(PER_RANK * self.ranks, updates, seed)
        return [[ms.Tensor(value[self.rank :: self.ranks]) for value in batch] for batch in shares]

    def keep(self, name: str, state: dict[str, np.ndarray], losses=()) -> None:
        self.results[f"{name}/losses"] = np.array(losses)
        for key, value in state.items():
            self.results[f"{name}/{key}"] = value

    def train(
        self,
        name: str,
        kind: str,
        sharded: bool,
        scale: float | None = None,
        flush: bool = False,
        broken: Break | None = None,
        optimizer_options: dict | None = None,
        apart: bool = False,
        **options,
    ):
        network = make_network()
        for parameter in network.get_parameters():
            if apart:  # rank 1 begins with other weights, which rank 0's are to replace
                parameter.set_data(parameter + self.rank)
        optimizer = make_optimizer(kind, network, sharded, **(optimizer_options or {}))
        loss_cell = options.pop("loss_cell", nn.WithLossCell)(network, nn.CrossEntropyLoss())
        cell = GradAccumulationCell(loss_cell, **{"micro_size": 2, **options})
        sense = None if scale is None else nn.DynamicLossScaleUpdateCell(scale, 2, 100)
        step = TrainOneStepWithGradAccumulationCell(cell, optimizer, scale_sense=sense).set_train()
        if broken is not None:
            broken(optimizer, step)
        self.go_on(name, step, flush=flush)
        return step

    def go_on(self, name: str, step, poison: int | None = None, flush: bool = False) -> None:
        losses = []
        for number, batch in enumerate(self.data()):
            if number == poison and self.rank == 1:  # an overflow on one rank
                batch = [batch[0] * float("inf"), *batch[1:]]
            output = step(*batch)
            losses.append(float((output[0] if isinstance(output, tuple) else output).asnumpy()))
        if flush:
            step.flush()
        state = state_of(step.network, step.optimizer)
        state["updates"] = as_numpy(step.update_count)
        print(name, flush=True)
        self.keep(name, state, losses)

    def both(self, name: str, kind: str, sharded_options: dict | None = None, **options) -> tuple:
        whole = self.train(f"{name}/whole", kind, False, **options)
        return whole, self.train(f"{name}/sharded", kind, True, **options, **(sharded_options or {}))


class CountedLoss(nn.Cell):
    """The mean over the samples whose first feature is positive: ranks count differently."""

    def __init__(self, network, loss):
        super().__init__()
        self.network = network
        self.loss = nn.CrossEntropyLoss(reduction="none")

    def construct(self, x, y):
        counted = (x[:, 0] > 0).astype(ms.float32)
        losses = self.loss(self.network(x), y)
        return (losses * counted).sum() / counted.sum()


def count(x, y):
    return (x[:, 0] > 0).astype(ms.float32).sum()


class RepeatsOwnPart(nn.Cell):
    """In the place of AllGather: a rank that forgets to gather."""

    def __init__(self, ranks):
        super().__init__(auto_prefix=False)
        self.ranks = ranks

    def construct(self, row):
        return ops.concat([row] * self.ranks)


def forget_to_gather(optimizer: ShardedOptimizer, step) -> None:
    optimizer.layout.all_gather = RepeatsOwnPart(optimizer.ranks)


def take_the_neighbours_slice(optimizer: ShardedOptimizer, step) -> None:
    layout = optimizer.layout
    neighbour = (layout.rank + 1) % layout.ranks
    layout.starts = tuple(
        min(neighbour * columns, size - columns) for columns, size in zip(layout.columns, layout.sizes, strict=True)
    )


def weigh_by_own_unit(optimizer: ShardedOptimizer, step) -> None:
    step.window.weighing.reduction.mean_over_ranks = lambda own: own


COUNTED = {"loss_cell": CountedLoss, "count": count, "max_grad_norm": 0.5}
SHARDED_ACCUMULATORS = {"shard_accumulators": True}


def counted_and_overflow(trainer: Trainer) -> None:
    for name, step in zip(("whole", "sharded"), trainer.both("counted", "adam", scale=1024.0, **COUNTED), strict=True):
        trainer.go_on(f"overflow/{name}", step, poison=1)


def small_buffers(trainer: Trainer) -> None:
    """Many buffers, both ways, which must come in the same order on all ranks, whose graphs differ by parameters."""
    large = shards.BUFFER_BYTES, fused_reduction.BUFFER_BYTES
    shards.BUFFER_BYTES = fused_reduction.BUFFER_BYTES = 64
    try:
        trainer.train("small buffers/sharded", "adam_weight_decay", True)
        by_parameters = {"optimizer_options": {"partition": "parameters"}}
        trainer.train("small buffers by parameters/sharded", "adam_weight_decay", True, **by_parameters)
    finally:
        shards.BUFFER_BYTES, fused_reduction.BUFFER_BYTES = large


def in_pynative_mode(task: Callable[[Trainer], object]) -> Callable[[Trainer], object]:
    def run(trainer: Trainer) -> None:
        ms.set_context(mode=ms.PYNATIVE_MODE)
        task(trainer)

    return run


def apart(name: str, kind: str, **options) -> Callable[[Trainer], object]:
    """Ranks that begin with different weights, which are broadcast."""

    def run(trainer: Trainer) -> None:
        ms.set_auto_parallel_context(parameter_broadcast=True)
        trainer.train(f"{name}/sharded", kind, True, apart=True, **options)

    return run


def loop_of_ones_own(trainer: Trainer) -> None:
    for sharded in (False, True):
        network = make_network()
        optimizer = make_optimizer("adam", network, sharded)
        gradient = ms.value_and_grad(nn.WithLossCell(network, nn.CrossEntropyLoss()), None, optimizer.parameters)
        accumulator = GradAccumulator(optimizer, 2, max_grad_norm=0.5)
        losses = []
        for batch in trainer.data(5):
            loss, gradients = gradient(*batch)
            losses.append(float(loss.asnumpy()))
            accumulator(gradients)
        accumulator.flush()
        trainer.keep(f"by hand/{'sharded' if sharded else 'whole'}", state_of(network, optimizer), losses)


def rates(trainer: Trainer) -> None:
    """Learning rates are seen and changed through the sharded optimizer, on ranks without a group's weights too."""
    for sharded in (False, True):
        network = make_network()
        optimizer = make_optimizer("trust_ratio", network, sharded)
        multiply_learning_rate(optimizer, 0.5)
        found = [float(rate.asnumpy()) for rate in optimizer.get_lr_parameter(list(optimizer.parameters))]
        found += [float(rate.asnumpy()) for rate in optimizer.learning_rate]
        found += [current_learning_rate(optimizer), float(optimizer.global_step.asnumpy()[0])]
        trainer.results[f"rates/{sharded:d}"] = np.array(found)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def joined_data(start: int, end: int) -> list[list[np.ndarray]]:
    """This rank's share of batches that all numbers of ranks have in common."""
    rank, ranks = shards.rank_and_ranks()
    return [[value[rank::ranks] for value in batch] for batch in batches(JOINED, 4)[start:end]]


def make_step(sharded: bool = True, kind: str = "adam", **options) -> TrainOneStepWithGradAccumulationCell:
    network = make_network()
    cell = GradAccumulationCell(nn.WithLossCell(network, nn.CrossEntropyLoss()), 3, **options)
    return TrainOneStepWithGradAccumulationCell(cell, make_optimizer(kind, network, sharded)).set_train()


def run(step, start: int, end: int) -> dict[str, np.ndarray]:
    for batch in joined_data(start, end):
        step(*map(ms.Tensor, batch))
    return state_of(step.network, step.optimizer)


def data_set(batches_of_rank: int = 4) -> ms.dataset.Dataset:
    shares = [np.concatenate(values) for values in zip(*joined_data(0, batches_of_rank), strict=True)]
    size = JOINED // shards.rank_and_ranks()[1]
    return ms.dataset.NumpySlicesDataset(tuple(shares), shuffle=False).batch(size)


def model_of(step) -> ms.Model:
    """As ms.Model would build it: a step is a model of its own."""
    return ms.Model(step)


def said(task: Callable[[], object]) -> np.ndarray:
    """The error that a task raises, on this rank."""
    try:
        task()
    except (ValueError, RuntimeError) as error:
        return np.array(f"{type(error).__name__}: {error}")
    return np.array("no error")


def by_hand(kind: str, from_one: str) -> Callable[[Trainer, Path], object]:
    """Saved by rank 0, and gone on from what one process has saved."""

    def task(trainer: Trainer, out: Path) -> None:
        trained = make_step(kind=kind)
        run(trained, 0, 2)
        with trained.optimizer.whole_state():
            if trainer.rank == 0:
                ms.save_checkpoint(trained, str(out / f"{kind}-by-hand.ckpt"))
        trainer.keep(f"{kind} went on", run(trained, 2, 4))
        resume(trained, out / from_one)  # into a step that is compiled, and in another state
        trainer.keep(f"{kind} from one", run(trained, 2, 4))

    return task


def by_callbacks(trainer: Trainer, out: Path) -> None:
    mine = out / f"rank{trainer.rank}"
    step = make_step(shard_accumulators=True)
    trainer.results["alone/error"] = said(lambda: ms.save_checkpoint(step, str(mine / "alone.ckpt")))
    model_of(step).train(
        1,
        data_set(2),
        callbacks=[
            UpdateCheckpoint(2, prefix="updates", directory=str(mine)),
            train.ModelCheckpoint("batches", str(mine), train.CheckpointConfig(2)),
        ],
    )
    trainer.results["alone again/error"] = said(lambda: ms.save_checkpoint(step, str(mine / "alone.ckpt")))

    step = make_step()
    resume(step, mine / "updates-1_2.ckpt")
    trainer.keep("resumed", run(step, 2, 4))


def loaded_otherwise(trainer: Trainer, out: Path) -> None:
    """What `by_callbacks` has saved."""
    mine = out / f"rank{trainer.rank}"
    step = make_step()
    with step.optimizer.whole_state():
        ms.load_checkpoint(str(mine / "batches-1_2.ckpt"), step)
    trainer.keep("mindspore's load", run(step, 2, 4))
    step = make_step(False)
    resume(step, mine / "updates-1_2.ckpt")
    trainer.keep("to plain", run(step, 2, 4))


def save_in_window(step, file: str) -> dict[str, np.ndarray]:
    """Save in mid-window; what is there at its end."""
    run(step, 0, 3)
    with step.optimizer.whole_state():
        ms.save_checkpoint(step, file)
    return run(step, 3, 4)


def in_window(trainer: Trainer, out: Path) -> None:
    """With the accumulators in slices, and gone on in a new step."""
    file, name = str(out / f"window{trainer.rank}.ckpt"), "window with sharded accumulators"
    options = {"accumulation_steps": 2, "shard_accumulators": True}
    trainer.keep(f"{name}/whole", save_in_window(make_step(**options), file))
    step = make_step(**options)
    resume(step, file)
    trainer.keep(f"{name}/resumed", run(step, 3, 4))
    whole = make_step(accumulation_steps=2)
    trainer.results["other accumulators/error"] = said(lambda: resume(whole, file))


def in_window_with_whole_accumulators(trainer: Trainer, out: Path) -> None:
    """Gone on in the same step, which is compiled, and in another state."""
    file, step = str(out / f"window-whole{trainer.rank}.ckpt"), make_step(accumulation_steps=2)
    trainer.keep("window/whole", save_in_window(step, file))
    resume(step, file)
    trainer.keep("window/resumed", run(step, 3, 4))


def refusals(trainer: Trainer, out: Path) -> None:
    """Each on both ranks, and none waits for the other."""
    rank, errors = trainer.rank, {}
    mine, trained = out / f"refused{rank}", make_step()
    run_batches(trained)
    checkpoint = functools.partial(train.ModelCheckpoint, "x", str(mine))
    on_rank_0 = [checkpoint()] if rank == 0 else []
    errors["one rank"] = said(lambda: model_of(make_step()).train(1, data_set(), callbacks=on_rank_0))
    by_time = checkpoint(train.CheckpointConfig(save_checkpoint_steps=0, save_checkpoint_seconds=1))
    errors["by time"] = said(lambda: model_of(make_step()).train(1, data_set(), callbacks=[by_time]))
    flush = FlushAccumulation()
    spanning = make_step(accumulation_steps=2)
    errors["uneven"] = said(lambda: model_of(spanning).train(1, data_set(4 - rank), callbacks=[flush, checkpoint()]))
    spanning = make_step(accumulation_steps=2, shard_accumulators=True)
    errors["uneven shards"] = said(lambda: model_of(spanning).train(1, data_set(4 - rank), callbacks=[flush]))
    batch = [ms.Tensor(value[: 3 - rank]) for value in joined_data(0, 1)[0]]
    errors["micro-batches"] = said(lambda: make_step(shard_accumulators=True)(*batch))
    plain = nn.TrainOneStepCell(nn.WithLossCell(make_network(), nn.CrossEntropyLoss()), make_step().optimizer)
    errors["plain step"] = said(lambda: ms.save_checkpoint(plain, str(mine / "plain.ckpt")))

    def update_within():
        with trained.optimizer.whole_state():
            run_batches(trained)

    errors["update within"] = said(update_within)
    for name, text in errors.items():
        trainer.results[f"{name}/error"] = text


def run_batches(step) -> None:
    for batch in joined_data(0, 1):
        step(*map(ms.Tensor, batch))


# -- memory ------------------------------------------------------------------------------------------------------------


def kept(optimizer: nn.Optimizer) -> dict[str, int]:
    """Bytes of the optimizer's Parameters: its state, and copies of the weights; not the weights."""
    weights = {id(weight) for weight in optimizer.parameters}
    own = [one for one in optimizer.get_parameters() if id(one) not in weights]
    copies = [one for one in own if one.name.startswith(PART)]
    return {
        "state": sum(one.nbytes for one in own) - sum(one.nbytes for one in copies),
        "copies": sum(one.nbytes for one in copies),
        "weights": sum(weight.nbytes for weight in optimizer.parameters),
    }


def large_network() -> nn.Cell:
    """No parameter's size divides by 8."""
    return nn.SequentialCell(nn.Dense(783, 513), nn.ReLU(), nn.Dense(513, 511), nn.ReLU(), nn.Dense(511, 9))


def memory(trainer: Trainer, out: Path) -> None:
    for name, kind, sharded, partition in (
        ("whole", nn.Adam, False, None),
        ("slices", nn.Adam, True, None),
        ("parameters", nn.Adam, True, "parameters"),
    ):
        params = large_network().trainable_params()
        optimizer = ShardedOptimizer(kind, params, 0.01, partition=partition) if sharded else kind(params, 0.01)
        for key, value in kept(optimizer).items():
            trainer.results[f"bytes/{name}/{key}"] = np.array(value)
    for sharded in (False, True):
        loss_cell = nn.WithLossCell(large_network(), nn.CrossEntropyLoss())
        cell = GradAccumulationCell(loss_cell, 2, shard_accumulators=sharded)
        step = TrainOneStepWithGradAccumulationCell(cell, nn.Adam(cell.trainable_params()))
        trainer.results[f"bytes/accumulators/{sharded:d}"] = np.array(sum(one.nbytes for one in step.accu_grads))


def from_two(trainer: Trainer, out: Path) -> None:
    step = make_step(shard_accumulators=True)
    resume(step, out / "rank0" / "updates-1_2.ckpt")
    trainer.keep("from two", run(step, 2, 4))


# -- all cases ---------------------------------------------------------------------------------------------------------

Task = Callable[[Trainer], object]
TASKS: dict[tuple[str, ...], Task] = {
    **{
        (kind,): lambda trainer, kind=kind: trainer.both(kind, kind)
        for kind in ("sgd", "momentum", "adam", "adam_weight_decay", "asgd", "adafactor")
    },
    ("trust_ratio",): lambda trainer: trainer.both("trust_ratio", "trust_ratio", max_grad_norm=0.5),
    ("counted", "overflow"): counted_and_overflow,
    ("flush",): lambda trainer: trainer.both("flush", "adam", accumulation_steps=3, flush=True, **COUNTED),
    ("shards",): lambda trainer: trainer.train("shards/sharded", "adam", True, **SHARDED_ACCUMULATORS),
    ("shards counted",): lambda trainer: trainer.train(
        "shards counted/sharded", "adam", True, **SHARDED_ACCUMULATORS, **COUNTED
    ),
    ("shards by parameters",): lambda trainer: trainer.both(
        "shards by parameters", "trust_ratio", SHARDED_ACCUMULATORS, **COUNTED
    ),
    ("shards flush",): lambda trainer: trainer.train(
        "shards flush/sharded", "adam", True, accumulation_steps=3, flush=True, **SHARDED_ACCUMULATORS, **COUNTED
    ),
    ("broken: forgets",): lambda trainer: trainer.train("broken: forgets", "adam", True, broken=forget_to_gather),
    ("broken: neighbour",): lambda trainer: trainer.train(
        "broken: neighbour", "adam", True, broken=take_the_neighbours_slice
    ),
    ("broken: unit",): lambda trainer: trainer.train(
        "broken: unit", "adam", True, broken=weigh_by_own_unit, micro_size=2, **SHARDED_ACCUMULATORS, **COUNTED
    ),
    ("small buffers", "small buffers by parameters"): small_buffers,
    ("pynative",): in_pynative_mode(lambda trainer: trainer.train("pynative/sharded", "adam", True)),
    ("pynative by parameters",): in_pynative_mode(
        lambda trainer: trainer.train("pynative by parameters/sharded", "trust_ratio", True, max_grad_norm=0.5)
    ),
    ("pynative shards",): in_pynative_mode(
        lambda trainer: trainer.train("pynative shards/sharded", "adam", True, **SHARDED_ACCUMULATORS, **COUNTED)
    ),
    ("jit",): in_pynative_mode(lambda trainer: trainer.train("jit/sharded", "adam", True, jit=True)),
    ("broadcast",): apart("broadcast", "adam"),
    ("broadcast by parameters",): apart("broadcast by parameters", "trust_ratio", max_grad_norm=0.5),
    ("pynative broadcast",): in_pynative_mode(apart("pynative broadcast", "adam")),
    ("by hand",): loop_of_ones_own,
    ("rates",): rates,
}
WITH_FILES: dict[tuple[str, ...], Callable[[Trainer, Path], object]] = {
    ("adam went on", "adam from one"): by_hand("adam", "one-rank.ckpt"),
    ("adafactor went on", "adafactor from one"): by_hand("adafactor", "one-rank-adafactor.ckpt"),
    ("alone", "alone again", "resumed"): by_callbacks,
    ("mindspore's load", "to plain"): loaded_otherwise,
    ("window with sharded accumulators", "other accumulators"): in_window,
    ("window",): in_window_with_whole_accumulators,
    ("one rank", "by time", "uneven", "uneven shards", "micro-batches", "plain step", "update within"): refusals,
    ("bytes",): memory,
    ("from two",): from_two,
}


def as_case(task: Callable[..., object], *, files: bool) -> Callable[[Path], Results]:
    def run_case(out: Path) -> Results:
        trainer = Trainer()
        task(trainer, *([out] if files else []))
        return trainer.results

    return run_case


CASES = {
    name: case
    for tasks, files in ((TASKS, False), (WITH_FILES, True))
    for names, task in tasks.items()
    for case in [as_case(task, files=files)]
    for name in names
}
