"""The cases of the sharding tests on ranks (support/ranks.py): trainings with ShardedOptimizer and without."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops, train
from mindspore.communication import get_rank
from mindspore.experimental import optim

from gaccum_ms import (
    FlushAccumulation,
    GradAccumulator,
    ShardedOptimizer,
    TrainOneStepWithGradAccumulationCell,
    UpdateCheckpoint,
    resume,
)
from gaccum_ms.distributed import all_reduce as fused_reduction
from gaccum_ms.distributed import layout as shards
from gaccum_ms.learning_rate import current_learning_rate, multiply_learning_rate
from tests.ranks.cases import error_of, named, set_up
from tests.support import reference
from tests.support.reference import CLASSES, FEATURES, Classifier, _decayed, as_numpy, batches
from tests.support.reuse import Reused
from tests.support.two_ranks import Results

UPDATES = 3
JOINED = 24  # samples of a batch on all ranks together, the same for any number of ranks
WIDTH = 3  # odd


class NormedNet(Classifier):
    """Has LayerNorm's `gamma` and `beta` . MindSpore's optimizers do not decay Parameters of these names."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Dense(FEATURES, WIDTH)
        self.norm = nn.LayerNorm((WIDTH,))
        self.out = nn.Dense(WIDTH, CLASSES)
        random = np.random.default_rng(5)
        for parameter in self.get_parameters():
            parameter.set_data(ms.Tensor(random.normal(size=parameter.shape), ms.float32))

    def logits(self, x):
        return self.out(self.norm(ops.tanh(self.hidden(x))))


# Name: the class, its arguments, and how the parameters are grouped.
OPTIMIZERS: dict[str, tuple] = {
    "momentum": (nn.Momentum, {"learning_rate": 0.05, "momentum": 0.9, "weight_decay": 0.1}, list),
    "adam": (nn.Adam, {"learning_rate": [0.02, 0.01, 0.02, 0.03] * 2, "weight_decay": 0.1}, list),
    "experimental": (optim.Adam, {"lr": 0.02, "amsgrad": True}, list),
    "grouped": (nn.AdamWeightDecay, {"learning_rate": 0.01, "weight_decay": 0.1}, _decayed),
}


def make_optimizer(name: str, weights: Iterable[ms.Parameter], sharded: bool, partition: Any = None) -> nn.Optimizer:
    kind, arguments, grouped = OPTIMIZERS[name]
    if sharded:
        return ShardedOptimizer(kind, grouped(weights), partition=partition, **arguments)
    return kind(grouped(weights), **arguments)


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


COUNTED = {"loss": CountedLoss, "count": count, "max_grad_norm": 0.5}


def make_step(
    sharded: bool = True,
    kind: str = "adam",
    loss: Callable = nn.WithLossCell,
    scale_sense: Any = None,
    partition: str | None = None,
    **options,
) -> TrainOneStepWithGradAccumulationCell:
    make = functools.partial(make_optimizer, kind, sharded=sharded, partition=partition)
    network = loss(NormedNet(), nn.CrossEntropyLoss())
    return reference.make_step(network, make, scale_sense, **{"micro_size": 3, **options})


def joined_data(start: int, end: int) -> list[list[np.ndarray]]:
    """This rank's share of batches that are the same for any number of ranks."""
    rank, ranks = shards.rank_and_ranks()
    return [[value[rank::ranks] for value in batch] for batch in batches(JOINED, 4)[start:end]]


def state_of(network: nn.Cell, optimizer: nn.Optimizer) -> Results:
    """Weights and the whole state, by name."""
    if isinstance(optimizer, ShardedOptimizer):
        with optimizer.whole_state():
            return state_of(network, optimizer.inner)
    return {one.name: as_numpy(one) for one in (*network.get_parameters(), *optimizer.get_parameters())}


def run(step: TrainOneStepWithGradAccumulationCell, start: int, end: int) -> Results:
    for batch in joined_data(start, end):
        step(*map(ms.Tensor, batch))
    return state_of(step.network, step.optimizer)


def train_three(step: TrainOneStepWithGradAccumulationCell, poison: int | None = None, flush: bool = False) -> Results:
    """The losses and the state after three batches, one of which may overflow on rank 1."""
    losses = []
    for number, (x, y) in enumerate(joined_data(0, UPDATES)):
        if number == poison and get_rank() == 1:
            x = x * np.float32("inf")
        output = step(ms.Tensor(x), ms.Tensor(y))
        losses.append(float((output[0] if isinstance(output, tuple) else output).asnumpy()))
    if flush:
        step.flush()
    state = state_of(step.network, step.optimizer)
    return {"losses": np.array(losses), "updates": as_numpy(step.update_count), **state}


# -- trainings ---------------------------------------------------------------------------------------------------------


def counted_and_overflow(out: Path) -> Results:
    results = {}
    for whose in ("whole", "sharded"):
        set_up("graph" if whose == "sharded" else "pynative")
        sense = nn.DynamicLossScaleUpdateCell(1024.0, 2, 100)
        step = make_step(whose == "sharded", scale_sense=sense, **COUNTED)
        results |= named(f"counted/{whose}", train_three(step)) | named(f"overflow/{whose}", train_three(step, 1))
    return results


def by_parameters(out: Path) -> Results:
    """Rank 1 begins with other weights, which rank 0's must replace. Many buffers are reduced and gathered, in the same
    order on all ranks, although the ranks' graphs differ."""
    ms.set_auto_parallel_context(parameter_broadcast=True)
    large = shards.BUFFER_BYTES, fused_reduction.BUFFER_BYTES
    shards.BUFFER_BYTES = fused_reduction.BUFFER_BYTES = 64
    try:
        step = make_step(partition="parameters", **COUNTED)
        for weight in step.weights:
            weight.set_data(weight + get_rank())
        return named("by parameters/sharded", train_three(step))
    finally:
        shards.BUFFER_BYTES, fused_reduction.BUFFER_BYTES = large


def both(name: str, kind: str, flush: bool = False, **options) -> Callable[[Path], Results]:
    """A training with the optimizer sharded, and without."""

    def case(out: Path) -> Results:
        set_up()
        sharded, whole = (train_three(make_step(one, kind, **options), flush=flush) for one in (True, False))
        return named(f"{name}/sharded", sharded) | named(f"{name}/whole", whole)

    return case


def loop_of_ones_own(out: Path) -> Results:
    set_up()
    results = {}
    for sharded in (False, True):
        network = NormedNet()
        optimizer = make_optimizer("momentum", network.trainable_params(), sharded)
        gradient = ms.value_and_grad(nn.WithLossCell(network, nn.CrossEntropyLoss()), None, optimizer.parameters)
        accumulator = GradAccumulator(optimizer, 2, max_grad_norm=0.5)
        for batch in joined_data(0, 3):
            accumulator(gradient(*map(ms.Tensor, batch))[1])
        accumulator.flush()
        results |= named(f"by hand/{'sharded' if sharded else 'whole'}", state_of(network, optimizer))
    return results


def rates(out: Path) -> Results:
    """Learning rates are seen and changed through the sharded optimizer, on ranks without a group's weights too."""
    results = {}
    for sharded in (False, True):
        optimizer = make_optimizer("grouped", NormedNet().trainable_params(), sharded, "parameters")
        multiply_learning_rate(optimizer, 0.5)
        numbers = [float(rate.asnumpy()) for rate in optimizer.get_lr_parameter(list(optimizer.parameters))]
        numbers += [float(rate.asnumpy()) for rate in optimizer.learning_rate]
        numbers += [current_learning_rate(optimizer), float(optimizer.global_step.asnumpy()[0])]
        results[f"rates/{sharded:d}"] = np.array(numbers)
    return results


# -- checkpoints -------------------------------------------------------------------------------------------------------


def data_set(batches_of_rank: int = 4) -> ms.dataset.Dataset:
    shares = [np.concatenate(values) for values in zip(*joined_data(0, batches_of_rank), strict=True)]
    size = JOINED // shards.rank_and_ranks()[1]
    return ms.dataset.NumpySlicesDataset(tuple(shares), shuffle=False).batch(size)


def one_step(out: Path) -> Results:
    """One step, compiled once, goes on from one process, then trains from the start, and goes on from its own files."""
    mine, steps, errors = out / f"rank{get_rank()}", Reused(make_step), {}
    step = steps()
    resume(step, out / "one-rank-adam.ckpt")  # into a new step
    results = named("adam from one", run(step, 2, 4))

    step = steps()
    errors["alone"] = error_of(lambda: ms.save_checkpoint(step, str(mine / "alone.ckpt")))
    callbacks = [
        UpdateCheckpoint(2, prefix="updates", directory=str(mine)),
        train.ModelCheckpoint("batches", str(mine), train.CheckpointConfig(2)),
    ]
    ms.Model(step).train(1, data_set(2), callbacks=callbacks)
    with step.optimizer.whole_state():
        if get_rank() == 0:
            ms.save_checkpoint(step, str(out / "adam-by-hand.ckpt"))
    results |= named("adam went on", run(step, 2, 4))

    resume(step, mine / "updates-1_2.ckpt")
    results |= named("resumed", run(step, 2, 4))
    with step.optimizer.whole_state():
        ms.load_checkpoint(str(mine / "batches-1_2.ckpt"), step)
    results |= named("mindspore's load", run(step, 2, 4))

    def update_within():
        with step.optimizer.whole_state():
            step(*map(ms.Tensor, joined_data(0, 1)[0]))

    errors["update within"] = error_of(update_within)
    return results | {f"{name}/error": np.array(text) for name, text in errors.items()}


def refusals(out: Path) -> Results:
    """Both ranks raise each error, and none waits for the other."""
    rank = get_rank()
    checkpoint = functools.partial(train.ModelCheckpoint, "x", str(out / f"refused{rank}"))

    def error_of_training(*callbacks: train.Callback, batches_of_rank: int = 4, **options) -> str:
        model, data = ms.Model(make_step(**options)), data_set(batches_of_rank)
        return error_of(lambda: model.train(1, data, callbacks=list(callbacks)))

    by_time = checkpoint(train.CheckpointConfig(save_checkpoint_steps=0, save_checkpoint_seconds=1))
    plain = nn.TrainOneStepCell(nn.WithLossCell(NormedNet(), nn.CrossEntropyLoss()), make_step().optimizer)
    flush = FlushAccumulation(), checkpoint()
    errors = {
        "one rank": error_of_training(*([checkpoint()] if rank == 0 else [])),
        "by time": error_of_training(by_time),
        "uneven": error_of_training(*flush, batches_of_rank=4 - rank, accumulation_steps=2),
        "plain step": error_of(lambda: ms.save_checkpoint(plain, str(out / f"plain{rank}.ckpt"))),
    }
    return {f"{name}/error": np.array(text) for name, text in errors.items()}


# -- all cases ---------------------------------------------------------------------------------------------------------

OF_ONE_STEP = ("adam from one", "adam went on", "alone", "resumed", "mindspore's load", "update within")
CASES: dict[str, Callable[[Path], Results]] = {
    **dict.fromkeys(("counted", "overflow"), counted_and_overflow),
    "by parameters": by_parameters,
    "experimental": both("experimental", "experimental", flush=True, accumulation_steps=2, **COUNTED),
    "grouped": both("grouped", "grouped", partition="parameters", **COUNTED),
    "by hand": loop_of_ones_own,
    "rates": rates,
    **dict.fromkeys(OF_ONE_STEP, one_step),
    **dict.fromkeys(("one rank", "by time", "uneven", "plain step"), refusals),
}
