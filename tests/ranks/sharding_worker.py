"""The cases of the sharding tests on ranks (support/ranks.py): trainings with ShardedOptimizer and without."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn, ops, train
from mindspore.communication import get_group_size, get_rank
from mindspore.experimental import optim

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
from gaccum_ms.learning_rate import current_learning_rate, multiply_learning_rate
from tests.support import reference
from tests.support.modes import eagerly
from tests.support.reference import CLASSES, FEATURES, Classifier, _decayed, as_numpy, batches
from tests.support.reuse import Reused
from tests.support.two_ranks import Results

PER_RANK = 6
UPDATES = 3
WIDTH = 3  # odd
JOINED = 24  # samples of a batch on all ranks together, to compare different numbers of ranks


class NormedNet(Classifier):
    """Has LayerNorm's `gamma` and `beta` . MindSpore's optimizers do not decay Parameters of these names."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Dense(FEATURES, WIDTH)
        self.norm = nn.LayerNorm((WIDTH,))
        self.out = nn.Dense(WIDTH, CLASSES)

    def logits(self, x):
        return self.out(self.norm(ops.tanh(self.hidden(x))))


def make_network() -> NormedNet:
    network, random = NormedNet(), np.random.default_rng(5)
    for parameter in network.get_parameters():
        parameter.set_data(ms.Tensor(random.normal(size=parameter.shape), ms.float32))
    return network


class TrustRatio(nn.Optimizer):
    """Looks at whole parameters, like Lamb and LARS, which have no CPU kernels."""

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
    "experimental": (optim.Adam, {"lr": 0.02, "amsgrad": True}, list),
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

    def data(self, updates: int = UPDATES, seed: int = 3) -> list[list[ms.Tensor]]:
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
        """With `apart` rank 1 begins with other weights, which rank 0's weights must replace."""
        ms.set_auto_parallel_context(parameter_broadcast=apart)
        network = make_network()
        for parameter in network.get_parameters():
            if apart:
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

    @eagerly()
    def reference(self, name: str, kind: str, **options) -> None:
        """The unsharded training."""
        self.train(f"{name}/whole", kind, False, **options)


class CountedLoss(nn.Cell):
    """The mean over the samples whose first feature is positive, so that the ranks' counts differ."""

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
    """Replaces AllGather: the rank repeats its own part and does not gather."""

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


COUNTED = {"loss_cell": CountedLoss, "count": count, "max_grad_norm": 0.5}
BY_PARAMETERS = {"partition": "parameters"}


def train_and_overflow(trainer: Trainer, name: str, sharded: bool) -> None:
    step = trainer.train(f"counted/{name}", "adam", sharded, scale=1024.0, **COUNTED)
    trainer.go_on(f"overflow/{name}", step, poison=1)


def counted_and_overflow(trainer: Trainer) -> None:
    eagerly()(train_and_overflow)(trainer, "whole", False)
    train_and_overflow(trainer, "sharded", True)


def small_buffers(trainer: Trainer) -> None:
    """Many buffers are reduced and gathered, in the same order on all ranks, although by parameters graphs differ."""
    name = "small buffers by parameters"
    trainer.reference(name, "adam_weight_decay")
    large = shards.BUFFER_BYTES, fused_reduction.BUFFER_BYTES
    shards.BUFFER_BYTES = fused_reduction.BUFFER_BYTES = 64
    try:
        trainer.train(f"{name}/sharded", "adam_weight_decay", True, optimizer_options=BY_PARAMETERS)
    finally:
        shards.BUFFER_BYTES, fused_reduction.BUFFER_BYTES = large


def flush(trainer: Trainer) -> None:
    options = {"accumulation_steps": 2, "flush": True, **COUNTED}
    trainer.reference("flush", "sgd", **options)
    trainer.train("flush/sharded", "sgd", True, **options)


@eagerly()
def eager_by_parameters(trainer: Trainer) -> None:
    trainer.reference("pynative by parameters", "trust_ratio", **COUNTED)
    trainer.train("pynative by parameters/sharded", "trust_ratio", True, **COUNTED)


def experimental(trainer: Trainer) -> None:
    trainer.reference("experimental", "experimental", **COUNTED)
    trainer.train("experimental/sharded", "experimental", True, **COUNTED)


def training(name: str, kind: str, **options) -> Callable[[Trainer], object]:
    """A task that trains with the optimizer sharded, and with counts."""
    return lambda trainer: trainer.train(name, kind, True, **COUNTED, **options)


def loop_of_ones_own(trainer: Trainer) -> None:
    for sharded in (False, True):
        ms.set_context(mode=ms.GRAPH_MODE if sharded else ms.PYNATIVE_MODE)
        network = make_network()
        optimizer = make_optimizer("momentum", network, sharded)
        gradient = ms.value_and_grad(nn.WithLossCell(network, nn.CrossEntropyLoss()), None, optimizer.parameters)
        accumulator = GradAccumulator(optimizer, 2, max_grad_norm=0.5)
        losses = []
        for batch in trainer.data(3):
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
        numbers = [float(rate.asnumpy()) for rate in optimizer.get_lr_parameter(list(optimizer.parameters))]
        numbers += [float(rate.asnumpy()) for rate in optimizer.learning_rate]
        numbers += [current_learning_rate(optimizer), float(optimizer.global_step.asnumpy()[0])]
        trainer.results[f"rates/{sharded:d}"] = np.array(numbers)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def joined_data(start: int, end: int) -> list[list[np.ndarray]]:
    """This rank's share of batches that are the same for any number of ranks."""
    rank, ranks = shards.rank_and_ranks()
    return [[value[rank::ranks] for value in batch] for batch in batches(JOINED, 4)[start:end]]


def make_step(sharded: bool = True, **options) -> TrainOneStepWithGradAccumulationCell:
    network = make_network()
    return reference.make_step(
        nn.WithLossCell(network, nn.CrossEntropyLoss()),
        lambda weights: make_optimizer("adam", network, sharded),
        micro_size=3,
        **options,
    )


def run(step, start: int, end: int) -> dict[str, np.ndarray]:
    for batch in joined_data(start, end):
        step(*map(ms.Tensor, batch))
    return state_of(step.network, step.optimizer)


def data_set(batches_of_rank: int = 4) -> ms.dataset.Dataset:
    shares = [np.concatenate(values) for values in zip(*joined_data(0, batches_of_rank), strict=True)]
    size = JOINED // shards.rank_and_ranks()[1]
    return ms.dataset.NumpySlicesDataset(tuple(shares), shuffle=False).batch(size)


def said(task: Callable[[], object]) -> np.ndarray:
    """The error that a task raises, on this rank."""
    try:
        task()
    except (ValueError, RuntimeError) as error:
        return np.array(f"{type(error).__name__}: {error}")
    return np.array("no error")


def one_step(trainer: Trainer, out: Path) -> None:
    """One step, compiled once, goes on from one process, then trains from the start, and goes on from its own files."""
    mine, steps = out / f"rank{trainer.rank}", Reused(make_step)
    step = steps()
    resume(step, out / "one-rank-adam.ckpt")  # into a new step
    trainer.keep("adam from one", run(step, 2, 4))

    step = steps()
    trainer.results["alone/error"] = said(lambda: ms.save_checkpoint(step, str(mine / "alone.ckpt")))
    callbacks = [
        UpdateCheckpoint(2, prefix="updates", directory=str(mine)),
        train.ModelCheckpoint("batches", str(mine), train.CheckpointConfig(2)),
    ]
    ms.Model(step).train(1, data_set(2), callbacks=callbacks)
    trainer.results["alone again/error"] = said(lambda: ms.save_checkpoint(step, str(mine / "alone.ckpt")))
    save_by_hand(trainer, step, out / "adam-by-hand.ckpt")
    trainer.keep("adam went on", run(step, 2, 4))

    resume(step, mine / "updates-1_2.ckpt")
    trainer.keep("resumed", run(step, 2, 4))
    with step.optimizer.whole_state():
        ms.load_checkpoint(str(mine / "batches-1_2.ckpt"), step)
    trainer.keep("mindspore's load", run(step, 2, 4))

    def update_within():
        with step.optimizer.whole_state():
            step(*map(ms.Tensor, joined_data(0, 1)[0]))

    trainer.results["update within/error"] = said(update_within)


def save_by_hand(trainer: Trainer, step, file: Path) -> None:
    with step.optimizer.whole_state():
        if trainer.rank == 0:
            ms.save_checkpoint(step, str(file))


def refusals(trainer: Trainer, out: Path) -> None:
    """Both ranks raise each error, and none waits for the other."""
    rank, errors = trainer.rank, {}
    mine = out / f"refused{rank}"
    checkpoint = functools.partial(train.ModelCheckpoint, "x", str(mine))
    on_rank_0 = [checkpoint()] if rank == 0 else []
    errors["one rank"] = said(lambda: ms.Model(make_step()).train(1, data_set(), callbacks=on_rank_0))
    by_time = checkpoint(train.CheckpointConfig(save_checkpoint_steps=0, save_checkpoint_seconds=1))
    errors["by time"] = said(lambda: ms.Model(make_step()).train(1, data_set(), callbacks=[by_time]))
    flush = FlushAccumulation()
    spanning = make_step(accumulation_steps=2)
    errors["uneven"] = said(lambda: ms.Model(spanning).train(1, data_set(4 - rank), callbacks=[flush, checkpoint()]))
    plain = nn.TrainOneStepCell(nn.WithLossCell(make_network(), nn.CrossEntropyLoss()), make_step().optimizer)
    errors["plain step"] = said(lambda: ms.save_checkpoint(plain, str(mine / "plain.ckpt")))

    for name, text in errors.items():
        trainer.results[f"{name}/error"] = text


# -- all cases ---------------------------------------------------------------------------------------------------------

Task = Callable[[Trainer], object]
TASKS: dict[tuple[str, ...], Task] = {
    ("counted", "overflow"): counted_and_overflow,
    ("by parameters",): eagerly()(
        training("by parameters/sharded", "adam", apart=True, optimizer_options=BY_PARAMETERS)
    ),
    ("experimental",): experimental,
    ("flush",): flush,
    ("broken: forgets",): eagerly()(training("broken: forgets", "adam", broken=forget_to_gather)),
    ("broken: neighbour",): eagerly()(training("broken: neighbour", "adam", broken=take_the_neighbours_slice)),
    ("small buffers by parameters",): small_buffers,
    ("pynative by parameters",): eager_by_parameters,
    ("by hand",): loop_of_ones_own,
    ("rates",): rates,
}
WITH_FILES: dict[tuple[str, ...], Callable[[Trainer, Path], object]] = {
    ("adam from one", "adam went on", "alone", "alone again", "resumed", "mindspore's load", "update within"): one_step,
    ("one rank", "by time", "uneven", "plain step"): refusals,
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
