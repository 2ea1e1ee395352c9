"""Random set-ups of histories, and what MindSpore trains for them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from gaccum_ms import (
    Accumulators,
    ClipByGlobalNorm,
    ClipByValue,
    CountMask,
    CountNotIgnored,
    EvenSplit,
    GradAccumulationCell,
    GradAccumulator,
    MaxTokens,
    SkipSpikes,
    TrainOneStepWithGradAccumulationCell,
    Transform,
    WeightAverage,
)
from tests.support.history_oracle import ADAM_EPS, IGNORED, LOSSES, Inputs, Setup, shapes_of, uneven_bounds

DTYPES = {"float32": ms.float32, "float16": ms.float16, "bfloat16": ms.bfloat16}


class Bomb:
    """Raises an error at the next call of a place, once. Only PyNative mode runs it. Not in the proof at the first
    batch, which would put back what is written here, so that the error would come again."""

    place: str | None = None
    error: BaseException | None = None

    @classmethod
    def arm(cls, place: str, error: BaseException) -> None:
        cls.place, cls.error = place, error

    @classmethod
    def at(cls, place: str) -> None:
        if cls.place == place and os.environ.get("MS_JIT") != "0":
            cls.place, error = None, cls.error
            raise error


class Network(nn.Cell):
    """A body of history_oracle.py with one of its losses."""

    def __init__(self, setup: Setup, seed: int) -> None:
        super().__init__()
        random = np.random.default_rng(seed)
        self.body, self.loss, self.aux, self.shared = setup.body, setup.loss, setup.aux, setup.shared
        self.explodes = setup.mode == "pynative"
        for name, shape in shapes_of(setup.body).items():
            setattr(self, name, ms.Parameter(Tensor(random.normal(size=shape) * 0.5, ms.float32), name=name))

    def construct(self, *inputs):
        if self.explodes:
            Bomb.at("forward")
        if self.body == "tokens":
            rows, mask = self.tokens(inputs[0], inputs[-1])
            errors = rows
            rows = rows * mask
        else:
            x = inputs[0] * inputs[1] if self.shared else inputs[0]
            rows = self.predict(x)
            mask = inputs[-1]
            errors = ops.square(rows - inputs[-2]) / 2
        losses = self.losses(errors, mask, rows)
        return (*losses, rows, rows.mean()) if self.aux else losses if len(losses) > 1 else losses[0]

    def predict(self, x):
        if self.body == "linear":
            return (x * self.w).sum(-1) + self.b
        return (ops.tanh(ops.matmul(x, self.hidden)) * self.out).sum(-1)

    def tokens(self, tokens, labels):
        mask = (labels != IGNORED).astype(ms.float32)
        logits = ops.matmul(ops.gather(self.table, tokens, 0), self.out)
        kept = ops.select(labels != IGNORED, labels, ops.zeros_like(labels))
        rows = ops.cross_entropy(logits.reshape((-1, 5)), kept.reshape((-1,)), reduction="none")
        return rows.reshape(labels.shape), mask

    def losses(self, errors, mask, rows):
        if self.loss == "mean":
            return (errors.mean(),)
        if self.loss == "sum":
            return (errors.sum(),)
        if self.loss == "masked":
            return ((errors * mask).sum() / mask.sum(),)
        if self.loss == "masked sum":
            return ((errors * mask).sum(),)
        if self.loss == "ratio":
            return (errors * mask).sum(), mask.sum()
        if self.loss == "focal":
            return (errors.sum(),)
        if self.loss == "focal ratio":
            return errors.sum(), mask.sum()
        if self.loss == "two means":
            return errors.mean(), rows.mean()
        if self.loss == "two masked":
            return (errors * mask).sum() / mask.sum(), rows.mean()
        return (errors * mask).sum(), rows.sum()


def count_mask(*inputs):
    Bomb.at("count")
    return inputs[-1].sum()


def count_rows(*inputs):
    return inputs[0].shape[0]


def uneven(*inputs):
    """Micro-batches of 2, 1, 3, 2, ... samples."""
    Bomb.at("split")
    bounds = uneven_bounds(inputs[0].shape[0])
    arrays = [one.asnumpy() for one in inputs]
    return [tuple(Tensor(one[a:b]) for one in arrays) for a, b in itertools.pairwise(bounds)]


def half(gradients):
    return ops.HyperMap()(ops.partial(ops.mul, Tensor(0.5, ms.float32)), gradients)


class LastLink(Transform):
    """Raises, if it is armed, before the optimizer writes, or after."""

    def change(self, gradients):
        Bomb.at("transform")
        return gradients

    def after_update(self, after):
        Bomb.at("after_update")
        return after


def make_transform(kind: str, *values: Any) -> Any:
    if kind == "half":
        return half
    if kind == "spikes":
        factor, norm, history, warmup = values
        return SkipSpikes(factor, norm=norm, history=history, warmup_updates=warmup)
    kinds: dict[str, Callable] = {"norm": ClipByGlobalNorm, "value": lambda low, high: ClipByValue(high, low)}
    kinds |= {"average": lambda decay, warmup: WeightAverage(decay, warmup=warmup), "last": LastLink}
    return kinds[kind](*values)


def make_optimizer(setup: Setup, weights: Sequence[ms.Parameter]) -> nn.Optimizer:
    rate = setup.rates[0] if len(setup.rates) == 1 else list(setup.rates) * 100
    if setup.optimizer == "sgd":
        return nn.SGD(weights, rate, weight_decay=setup.decay)
    if setup.optimizer == "adam":
        return nn.Adam(weights, rate, eps=ADAM_EPS, weight_decay=setup.decay)
    if setup.optimizer == "adam_weight_decay":
        return nn.AdamWeightDecay(weights, rate, eps=ADAM_EPS, weight_decay=setup.decay)
    return nn.Momentum(weights, rate, 0.9, setup.decay)


def make_scale(setup: Setup) -> nn.Cell | Tensor | None:
    if setup.scale is None:
        return None
    if len(setup.scale) == 1:
        return Tensor(setup.scale[0], ms.float32)
    return nn.DynamicLossScaleUpdateCell(*setup.scale)


def accumulator_options(setup: Setup) -> dict[str, Any]:
    """The options that a cell and a GradAccumulator have."""
    return {
        "max_grad_norm": setup.max_norm,
        "transforms": tuple(make_transform(*link) for link in setup.transforms),
        "accumulators": Accumulators(DTYPES[setup.dtype], setup.compensated),
        "overflow": "drop_micro_batch" if setup.drops else "drop_window",
        "jit": True if setup.mode == "jit" else None,
    }


def make_cell(setup: Setup, seed: int) -> GradAccumulationCell:
    of_mask = count_mask if setup.mode == "pynative" else CountMask()
    counts = {"mask": of_mask, "labels": CountNotIgnored(), "rows": count_rows, None: None}
    count = tuple(counts[name] for name in setup.counts)
    options = accumulator_options(setup)
    if setup.split == "uneven":
        options["split"] = uneven
    elif setup.split == "tokens":
        options["split"] = MaxTokens(16, length=token_lengths, widths=2)
    elif setup.shared:
        options["split"] = EvenSplit(shared=(1,))
    return GradAccumulationCell(
        Network(setup, seed),
        setup.micro_size,
        micro_batch_size=setup.micro_batch_size,
        accumulation_steps=setup.steps,
        reduction=setup.reduction,
        min_count=setup.min_count,
        count=count if len(count) > 1 and any(count) else count[0],
        loss_weights=setup.loss_weights,
        record_noise=setup.noise,
        aux=setup.aux,
        **options,
    )


def token_lengths(tokens, labels):
    """A sample ends behind its last label that is not ignored."""
    return np.array([np.flatnonzero(row != IGNORED).max(initial=-1) + 1 for row in labels.asnumpy()])


def make_trainer(setup: Setup, seed: int) -> Any:
    """The step or GradAccumulator, and what it trains, as `network` ."""
    if setup.accumulator:
        network = Network(setup, seed)
        optimizer = make_optimizer(setup, network.trainable_params())
        options = accumulator_options(setup)
        options |= {"reduction": setup.reduction, "min_count": setup.min_count, "jit": setup.mode == "jit"}
        trainer = GradAccumulator(optimizer, setup.steps, scale_sense=make_scale(setup), **options)
    else:
        cell = make_cell(setup, seed)
        network = cell.network
        optimizer = make_optimizer(setup, network.trainable_params())
        trainer = TrainOneStepWithGradAccumulationCell(cell, optimizer, make_scale(setup)).set_train()
    return trainer, network


# -- at random ---------------------------------------------------------------------------------------------------------


def random_setup(random: np.random.Generator, mode: str, ranks: int) -> Setup:
    """A set-up whose options go together: others are drawn again."""
    while True:
        setup = _drawn(random, mode, ranks)
        try:
            make_trainer(setup, 0)
        except ValueError:
            continue
        return setup


def _drawn(random: np.random.Generator, mode: str, ranks: int) -> Setup:
    def draw(chance: float, *values: Any) -> Any:
        """One of the values but the first, with this chance."""
        return values[random.integers(1, len(values))] if random.random() < chance else values[0]

    accumulator = bool(random.random() < 0.15)
    body = draw(0.6, "linear", "tanh", "tokens") if not accumulator else draw(0.5, "linear", "tanh")
    losses = ["masked", "masked sum", "ratio", "focal", "focal ratio"] if body == "tokens" else list(LOSSES)
    loss = str(random.choice(losses)) if not accumulator else draw(0.3, "mean", "focal")
    counts = LOSSES[loss][1]
    if accumulator and loss == "mean":
        counts = (draw(0.5, None, "mask"),)
    elif body == "tokens":
        counts = tuple(count and "labels" for count in counts)
    elif loss == "mean" and not accumulator:
        counts = (draw(0.15, None, "rows"),)
    reads_padding = body != "tokens" or loss.startswith("focal")  # MaxTokens leaves some of it out
    split = draw(0.25, None, "uneven") if reads_padding else draw(0.5, None, "uneven", "tokens")
    steps = int(draw(0.5, 1, 2, 3, 4)) if not accumulator else int(random.integers(1, 5))
    by_size = random.random() < 0.3
    size = int(random.integers(1, 6))
    optimizer = draw(0.7, "sgd", "momentum", "adam", "adam_weight_decay")
    low = draw(0.2, "float32", "float16", "bfloat16")
    scale = draw(0.4, None, (float(2 ** random.integers(0, 6)),), (float(2 ** random.integers(0, 6)), 2, 3))
    links = {
        "norm": (round(float(random.uniform(0.2, 2)), 3),),
        "value": (-0.3, round(float(random.uniform(0.1, 0.5)), 3)),
        "half": (),
        "spikes": (round(float(random.uniform(1.1, 3)), 3), round(float(random.uniform(0.5, 4)), 3), 4, 2),
        "average": (0.9, bool(random.random() < 0.5)),
    }
    chosen = [name for name in links if random.random() < 0.2]
    random.shuffle(chosen)
    transforms = tuple((name, *links[name]) for name in chosen)
    mode = mode if mode != "pynative" else draw(0.04, "pynative", "jit")
    if mode == "pynative" and random.random() < 0.4:
        transforms = (*transforms, ("last",))
    counted = LOSSES[loss][0] == "ratio" or any(counts)
    return Setup(
        body=body,
        loss=loss,
        counts=counts,
        micro_size=None if split or by_size or accumulator else size,
        micro_batch_size=size if by_size and not split and not accumulator else None,
        steps=steps,
        split=None if accumulator else split,
        shared=bool(not accumulator and body != "tokens" and split is None and random.random() < 0.15),
        loss_weights=draw(0.7, (1.0, 1.0), (0.5, 2.0)) if len(counts) > 1 and not accumulator else None,
        min_count=draw(0.4, None, 1.0, 4.0) if counted else None,
        max_norm=draw(0.25, None, round(float(random.uniform(0.2, 2)), 3)),
        transforms=transforms,
        dtype=low if optimizer in ("sgd", "momentum") else "float32",
        compensated=bool(random.random() < 0.15),
        drops=bool(random.random() < 0.2),
        noise=bool(random.random() < 0.15 and not accumulator),
        aux=bool(random.random() < 0.2 and not accumulator),
        scale=scale,
        optimizer=optimizer,
        rates=draw(0.3, (0.05,), (0.05, 0.1, 0.02, 0.05, 0.08)),
        decay=draw(0.3, 0.0, 0.01),
        mode=mode,
        gradients_mean=bool(random.random() < 0.5) or ranks == 1,
        accumulator=accumulator,
    )


def random_batch(random: np.random.Generator, setup: Setup, samples: int) -> Inputs:
    """A batch. Some samples, and sometimes all of them or the first ones, weigh nothing."""
    empty = random.choice(["", "", "", "", "all", "first", "last"])
    nothing = {"": slice(0, 0), "all": slice(None), "first": slice(0, samples // 2), "last": slice(samples // 2, None)}
    if setup.body == "tokens":
        width = 8
        tokens = random.integers(0, 7, (samples, width)).astype(np.int32)
        labels = random.integers(0, 5, (samples, width)).astype(np.int32)
        for row, length in enumerate(random.integers(0, width + 1, samples)):
            labels[row, length:] = IGNORED
        labels[0, width - 1] = IGNORED  # where no sample is short, MaxTokens asks for the value of padding
        labels[nothing[str(empty)]] = IGNORED
        return tokens, labels
    x = random.normal(size=(samples, 3)).astype(np.float32)
    y = random.normal(size=samples).astype(np.float32)
    mask = random.choice([0.0, 0.5, 1.0, 2.0], samples).astype(np.float32)
    mask[nothing[str(empty)]] = 0
    shared = (random.uniform(0.5, 1.5, 3).astype(np.float32),) if setup.shared else ()
    return (x, *shared, y, mask)
