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

from gaccum_ms import GradAccumulationCell, TrainOneStepWithGradAccumulationCell, WithBatchLossCell

Batch = tuple[np.ndarray, ...]

RATES = [0.1, 0.05, 0.2, 0.1, 0.15, 0.05, 0.1, 0.2, 0.1, 0.05]  # of the updates


class Weight(nn.Cell):
    """Predicts w x. The losses are for y, with a mask."""

    def __init__(self, weight=1.0):
        super().__init__()
        self.weight = ms.Parameter(Tensor(weight, ms.float32), name="weight")


class Masked(Weight):
    def construct(self, x, y, mask):
        return (ops.square(self.weight * x - y) * mask).sum() / mask.sum() / 2


class MaskedAndMean(Masked):
    def construct(self, x, y, mask):
        return super().construct(x, y, mask), (self.weight * x).mean()


class Scale(Weight):
    def construct(self, x):
        return self.weight * x


class Spread(nn.Cell):
    """A loss of the whole batch: half the variance of its representations."""

    def construct(self, r):
        return ops.square(r - r.mean()).mean() / 2


# -- the same in NumPy: mean loss, its gradient, and its items, for some samples ---------------------------------------


def masked(w, x, y, mask):
    total = mask.sum()
    if not total:
        return np.nan, np.nan, 0.0
    return ((w * x - y) ** 2 * mask).sum() / total / 2, ((w * x - y) * x * mask).sum() / total, total


def mean(w, x, y, mask):
    return np.mean(w * x), np.mean(x), len(x)


def spread(w, x):
    return w**2 * np.var(x) / 2, w * np.var(x), len(x)


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


class Case:
    """A step, and what its windows must do.

    Args:
        network (type): One of the above.
        mode (str): "graph", "pynative" or "jit".
        poisoned (Sequence): (batch, sample) of infinite inputs.
        scale (float): The loss scale.
        fixed_scale (bool): Whether the optimizer's `loss_scale` removes it from the gradient, and nothing is checked.
        flushes (bool): Whether each epoch ends a window.
        options: The cell's.
    """

    def __init__(
        self,
        network: type,
        mode: str = "pynative",
        poisoned: Sequence[tuple[int, int]] = (),
        *,
        scale: float | None = None,
        fixed_scale: bool = False,
        flushes: bool = False,
        **options: Any,
    ) -> None:
        self.network, self.mode, self.poisoned, self.options = network, mode, poisoned, options
        self.scale, self.fixed_scale, self.flushes = scale, fixed_scale, flushes
        self.terms = {Masked: (masked,), MaskedAndMean: (masked, mean), Spread: (spread,)}[network]
        self.weights = options.get("loss_weights") or (1.0,) * len(self.terms)
        self.steps = options.get("accumulation_steps", 1)
        self.counts = options.get("count") is not None

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
        network = WithBatchLossCell(Scale(), Spread()) if self.network is Spread else self.network()
        cell = GradAccumulationCell(network, jit=self.mode == "jit" or None, **self.options)
        removed = self.scale if self.fixed_scale else 1.0
        optimizer = nn.Momentum(cell.trainable_params(), RATES, 0.0, loss_scale=removed)
        if self.fixed_scale:
            manager = FixedLossScaleManager(self.scale, drop_overflow_update=False)
            return ms.Model(cell, optimizer=optimizer, loss_scale_manager=manager)
        sense = None if self.scale is None else nn.DynamicLossScaleUpdateCell(self.scale, 2, 1000)
        return ms.Model(TrainOneStepWithGradAccumulationCell(cell, optimizer, sense).set_train())

    def sums_of(self, term: Any, w: float, batches: Sequence[Batch]) -> Sums:
        result, drops = Sums(), self.options.get("overflow") == "drop_micro_batch"
        for batch in batches:
            samples = len(batch[0])
            size = samples if self.network is Spread else -(-samples // self.options["micro_size"])
            for at in range(0, samples, size):
                result.add(*term(w, *(one[at : at + size] for one in batch)), drops)
        return result

    def count_of(self, sums: Sums) -> float:
        """The count of a batch. If the batch is a window and counts are given, it is the window's count."""
        return sums.kept if self.counts and self.steps == 1 else sums.items

    def expected_records(self, epochs: Sequence[Sequence[Batch]]) -> tuple[list, float]:
        """The fields of each record except ``seconds`` , and the final weight."""
        w, updates, scale, window, records = 1.0, 0, self.scale, [], []
        checks, max_norm = scale is not None and not self.fixed_scale, self.options.get("max_grad_norm")
        several = len(self.terms) > 1
        for epoch, data in enumerate(epochs, start=1):
            for number, batch in enumerate(data, start=1):
                window.append(batch)
                if len(window) < self.steps and not (self.flushes and number == len(data)):
                    continue
                with np.errstate(all="ignore"):
                    of_terms = [self.sums_of(term, w, window) for term in self.terms]
                    of_batches = [self.sums_of(self.terms[0], w, [one]) for one in window]
                means = [one.mean() for one in of_terms]
                loss, gradient = (np.dot(self.weights, column) for column in zip(*means, strict=True))
                kept, dropped = sum(one.kept for one in of_terms), of_terms[0].dropped
                bad = not np.isfinite(gradient)
                updated = bool(kept) and not (checks and bad)
                records.append(
                    {
                        "update": updates + updated,
                        "updated": updated,
                        "epoch": epoch,
                        "batches": len(window),
                        "losses": (loss,) if several else tuple(one.mean()[0] for one in of_batches),
                        "loss": loss,
                        "counts": tuple(self.count_of(one) for one in (of_terms if several else of_batches)),
                        "count": None if several else of_terms[0].kept,
                        "loss_terms": tuple(one for one, _ in means) if several else None,
                        "dropped_micro_batches": dropped,
                        "grad_norm": abs(gradient) if max_norm else None,
                        "noise_scale": None,
                        "loss_scale": scale,
                        "learning_rate": RATES[updates],
                        "counted": "items" if self.counts else "samples",
                    }
                )
                if updated:
                    if max_norm and abs(gradient) > max_norm:
                        gradient = np.sign(gradient) * max_norm
                    w -= RATES[updates] * gradient
                    updates += 1
                if checks and (bad or dropped):
                    scale /= 2
                window = []
        return records, w
