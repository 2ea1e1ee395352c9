"""The expected records of `WindowMonitor` , computed in NumPy for one weight and windows of any kind.

It uses no code of the project: gradients are explicit formulas, windows are lists of batches, and all is float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.amp import FixedLossScaleManager

from gaccum_ms import (
    CountMask,
    GradAccumulationCell,
    TrainOneStepWithGradAccumulationCell,
    WithBatchLossCell,
)

Batch = tuple[np.ndarray, ...]

RATES = [0.1, 0.05, 0.2, 0.1, 0.15, 0.05, 0.1, 0.2, 0.1, 0.05]  # of the updates
COUNT_BOTH = (CountMask(), None)
# Fields of a record that may be equal on all ranks or not, and that no other test on ranks checks.
FIELDS = ("updated", "losses", "loss", "counts", "count", "loss_terms", "dropped_micro_batches", "grad_norm")


# -- networks: the loss of w x ~ y, with a mask as third input ---------------------------------------------------------


class Weight(nn.Cell):
    def __init__(self, weight=1.0):
        super().__init__()
        self.weight = ms.Parameter(Tensor(weight, ms.float32), name="weight")


class Mean(Weight):
    def construct(self, x, y, mask):
        return ops.square(self.weight * x - y).mean() / 2


class Masked(Weight):
    def construct(self, x, y, mask):
        return (ops.square(self.weight * x - y) * mask).sum() / mask.sum() / 2


class MaskedAndMean(Weight):
    def construct(self, x, y, mask):
        masked = (ops.square(self.weight * x - y) * mask).sum() / mask.sum() / 2
        return masked, (self.weight * x).mean()


class MeanAndMean(Weight):
    def construct(self, x, y, mask):
        return ops.square(self.weight * x - y).mean() / 2, (self.weight * x).mean()


class Scale(Weight):
    def construct(self, x):
        return self.weight * x


class Spread(nn.Cell):
    """A loss of the whole batch: half the variance of its representations."""

    def construct(self, r):
        return ops.square(r - r.mean()).mean() / 2


# -- the same in NumPy: mean loss, its gradient, and its items, for some samples ---------------------------------------


def squares(w, x, y, *mask):
    return np.mean((w * x - y) ** 2) / 2, np.mean((w * x - y) * x), len(x)


def masked(w, x, y, mask):
    total = mask.sum()
    if not total:
        return np.nan, np.nan, 0.0
    return ((w * x - y) ** 2 * mask).sum() / total / 2, ((w * x - y) * x * mask).sum() / total, total


def mean(w, x, y, mask):
    return np.mean(w * x), np.mean(x), len(x)


def spread(w, x, *others):
    return w**2 * np.var(x) / 2, w * np.var(x), len(x)


@dataclass(frozen=True)
class Plan:
    """How windows are made, with the names of the cell's options."""

    terms: tuple[Any, ...] = (squares,)
    weights: tuple[float, ...] = (1.0,)
    micro_size: int = 1
    steps: int = 1
    drops: bool = False
    checks: bool = False  # whether there is a loss scale that is checked for overflow
    scale: float | None = None
    max_norm: float | None = None
    flushes: bool = False
    counts: bool = False  # whether `count` is given

    def micro_batches(self, batch: Batch) -> list[Batch]:
        size = -(-len(batch[0]) // self.micro_size)
        return [tuple(one[at : at + size] for one in batch) for at in range(0, len(batch[0]), size)]

    def count_of(self, sums: Sums) -> float:
        """The count of a batch. If the batch is a window and counts are given, it is the window's count."""
        return sums.kept if self.counts and self.steps == 1 else sums.items


@dataclass
class Sums:
    """Sums over micro-batches: loss times items, gradient times items, the included items, and all items."""

    loss: float = 0.0
    gradient: float = 0.0
    kept: float = 0.0
    items: float = 0.0
    dropped: int = 0

    def add(self, loss: float, gradient: float, items: float, drops: bool) -> None:
        self.items += items
        if drops and items and not (np.isfinite(loss) and np.isfinite(gradient)):
            self.dropped += 1
        elif items:
            self.loss += loss * items
            self.gradient += gradient * items
            self.kept += items

    def mean(self) -> tuple[float, float]:
        return (self.loss / self.kept, self.gradient / self.kept) if self.kept else (0.0, 0.0)


def sums_of(plan: Plan, term: Any, w: float, batches: Sequence[Batch]) -> Sums:
    result = Sums()
    for batch in batches:
        for micro_batch in plan.micro_batches(batch):
            result.add(*term(w, *micro_batch), plan.drops)
    return result


def expected_records(plan: Plan, epochs: Sequence[Sequence[Batch]]) -> tuple[list, float]:
    """The fields of each record except ``seconds`` , and the final weight."""
    w, updates, scale, window, records = 1.0, 0, plan.scale, [], []
    with np.errstate(all="ignore"):
        for epoch, data in enumerate(epochs, start=1):
            for number, batch in enumerate(data, start=1):
                window.append(batch)
                if len(window) < plan.steps and not (plan.flushes and number == len(data)):
                    continue
                of_terms = [sums_of(plan, term, w, window) for term in plan.terms]
                means = [one.mean() for one in of_terms]
                loss, gradient = (np.dot(plan.weights, column) for column in zip(*means, strict=True))
                kept, dropped = sum(one.kept for one in of_terms), of_terms[0].dropped
                bad = not np.isfinite(gradient)
                updated = bool(kept) and not (plan.checks and bad)
                several = len(plan.terms) > 1
                of_batches = [sums_of(plan, plan.terms[0], w, [one]) for one in window]
                records.append(
                    {
                        "update": updates + updated,
                        "updated": updated,
                        "epoch": epoch,
                        "batches": len(window),
                        "losses": (loss,) if several else tuple(one.mean()[0] for one in of_batches),
                        "loss": loss,
                        "counts": tuple(plan.count_of(one) for one in (of_terms if several else of_batches)),
                        "count": None if several else of_terms[0].kept,
                        "loss_terms": tuple(one for one, _ in means) if several else None,
                        "dropped_micro_batches": dropped,
                        "grad_norm": abs(gradient) if plan.max_norm else None,
                        "noise_scale": None,
                        "loss_scale": scale,
                        "learning_rate": RATES[updates],
                        "counted": "items" if plan.counts else "samples",
                    }
                )
                if updated:
                    if plan.max_norm and abs(gradient) > plan.max_norm:
                        gradient = np.sign(gradient) * plan.max_norm
                    w -= RATES[updates] * gradient
                    updates += 1
                if plan.checks and scale and (bad or dropped):
                    scale /= 2
                window = []
    return records, w


# -- a step, and the oracle's description of it ------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    plan: Plan
    options: dict[str, Any]  # the cell's
    network: type
    mode: str  # "graph", "pynative" or "jit"
    poisoned: Sequence[tuple[int, int]]  # (batch, sample) of infinite inputs
    fixed_scale: bool  # the optimizer's `loss_scale` removes it from the gradient

    def batches(self, sizes: Sequence[int]) -> list[Batch]:
        """x, y and a mask that leaves samples out, including the last two of the first batch."""
        random, result = np.random.default_rng(0), []
        for number, size in enumerate(sizes):
            x, y = random.uniform(0.5, 1.5, (2, size)).astype(np.float32)
            mask = random.choice([0.0, 0.5, 1.0, 2.0], size).astype(np.float32)
            mask[-2:] = number > 0
            x[[sample for batch, sample in self.poisoned if batch == number]] = np.inf
            result.append((x,) if self.network is Spread else (x, y, mask))
        return result

    def make_model(self) -> ms.Model:
        network, scale = self.network(), self.plan.scale
        if self.network is Spread:
            network = WithBatchLossCell(Scale(), network)
        cell = GradAccumulationCell(network, jit=self.mode == "jit" or None, **self.options)
        removed = scale if self.fixed_scale else 1.0
        optimizer = nn.Momentum(cell.trainable_params(), RATES, 0.0, loss_scale=removed)
        if self.fixed_scale:
            manager = FixedLossScaleManager(scale, drop_overflow_update=False)
            return ms.Model(cell, optimizer=optimizer, loss_scale_manager=manager)
        sense = None if scale is None else nn.DynamicLossScaleUpdateCell(scale, 2, 1000)
        return ms.Model(TrainOneStepWithGradAccumulationCell(cell, optimizer, sense).set_train())


def case(
    network: type = Mean,
    mode: str = "pynative",
    poisoned: Sequence[tuple[int, int]] = (),
    *,
    scale: float | None = None,
    fixed_scale: bool = False,
    flushes: bool = False,
    **options: Any,
) -> Case:
    """A case, from options of the cell and of its surroundings."""
    terms = {Masked: (masked,), MaskedAndMean: (masked, mean), MeanAndMean: (squares, mean), Spread: (spread,)}
    terms_of = terms.get(network, (squares,))
    plan = Plan(
        terms=terms_of,
        weights=options.get("loss_weights") or (1.0,) * len(terms_of),
        micro_size=1 if network is Spread else options["micro_size"],
        steps=options.get("accumulation_steps", 1),
        drops=options.get("overflow") == "drop_micro_batch",
        checks=scale is not None and not fixed_scale,
        scale=scale,
        max_norm=options.get("max_grad_norm"),
        flushes=flushes,
        counts=options.get("count") is not None,
    )
    return Case(plan, options, network, mode, poisoned, fixed_scale)
