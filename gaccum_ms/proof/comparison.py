"""Parts of a batch and all of them together, evaluated and compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import nn

from gaccum_ms.backend.noise_of_rows import NoiseOfRows
from gaccum_ms.proof.rule import Inputs, Numbers, Rule

_SMALLEST = 1e-3  # losses that cancel to less are compared by their absolute difference
_TIMES_NOISE = 5
_RANDOM = 0.3  # of the loss


class Evaluation(NamedTuple):
    """Evaluates parts, each without an effect on the next. `tolerance` : the relative error that is rounding."""

    rule: Rule
    noise: NoiseOfRows
    put_back: Callable[[], None]
    tolerance: float

    def of(self, part: Inputs, rows: Sequence[int] | None = None) -> tuple[Numbers, list]:
        """The numbers of a part, and where its random numbers had their rows. `rows` : its samples, if each is to draw
        the same numbers in any part."""
        self.noise.begin(rows)
        try:
            return self.rule.numbers(part), self.noise.drawn
        finally:
            self.noise.begin(None)
            self.put_back()


class Comparison:
    """`whole` : the loss of all parts together; `made` : what the options make of those of the parts. `of_rows` :
    whether the parts' samples are those of `both` , in this order."""

    def __init__(self, evaluation: Evaluation, parts: Sequence[Inputs], both: Inputs, of_rows: bool = True) -> None:
        rule, self.tolerance = evaluation.rule, evaluation.tolerance
        ends = np.cumsum([0, *(rule.samples(part) for part in parts)]).tolist() if of_rows else []
        rows = [range(*pair) for pair in itertools.pairwise(ends)] if of_rows else [None] * len(parts)
        evaluated = [evaluation.of(part, of_part) for part, of_part in zip(parts, rows, strict=True)]
        self.rule, self.parts, self.both = rule, parts, both
        self.numbers = [numbers for numbers, _ in evaluated]
        self.losses = np.array([numbers.losses for numbers in self.numbers])
        self.made = rule.of_parts(self.numbers)

        def whole() -> Numbers:
            numbers, drawn = evaluation.of(both, range(ends[-1]) if of_rows else None)
            evaluated.append((numbers, drawn))
            return numbers

        self.of_both = whole()
        wholes = [rule.of_whole(self.of_both)]
        if not np.allclose(self.made, wholes[0], rtol=self.tolerance / 10, atol=0):  # is it more than noise?
            wholes.append(rule.of_whole(whole()))
            if not np.allclose(wholes[0], wholes[1], rtol=self.tolerance / 10, atol=0, equal_nan=True):
                wholes += [rule.of_whole(whole()) for _ in range(3)]
        self.whole, self.noise = wholes[0], np.max(wholes, 0) - np.min(wholes, 0)
        values = [self.whole[None]]
        if not rule.options.returns_ratio:
            values += [self.losses] if rule.options.loss_is_mean else [self.made[None]]
        with np.errstate(invalid="ignore"):
            finite = np.where(np.isfinite(np.concatenate(values)), np.abs(np.concatenate(values)), 0)
        self.scale = finite.max(0, initial=_SMALLEST)
        self.is_finite = bool(np.isfinite(self.whole).all() and np.isfinite(self.made).all())
        keeps_rows = all(drawn == evaluated[0][1] for _, drawn in evaluated)
        self.is_random = not keeps_rows or bool((self.noise / self.scale > _RANDOM).any())
        if rule.is_bfloat16:
            self.tolerance = max(self.tolerance, 2e-2)

    def errors(self, value: np.ndarray) -> np.ndarray:
        """The relative error of a value, of each loss."""
        with np.errstate(invalid="ignore"):
            errors = np.abs(self.whole - value) / self.scale
        return np.where(np.isfinite(errors), errors, np.inf)

    @property
    def off(self) -> np.ndarray:
        """The losses, as bools, that differ by more than rounding and noise."""
        is_noise = np.abs(self.whole - self.made) <= _TIMES_NOISE * self.noise
        return np.where(is_noise, 0, self.errors(self.made)) > self.tolerance

    @property
    def error(self) -> float:
        return float(self.errors(self.made).max())

    def holds(self, value: np.ndarray) -> bool:
        """Whether a value is that of all parts together."""
        return bool((self.errors(value) <= np.maximum(self.tolerance, self.noise / self.scale)).all())

    def fits(self, value: np.ndarray) -> bool:
        """Whether it holds, and what the options make is much further away."""
        return self.holds(value) and float(self.errors(value).max()) < self.error / 4

    @property
    def shows(self) -> bool:
        """Whether other weights of the parts would be seen: not if their losses are equal."""
        spread = np.ptp(self.losses, 0) / self.scale
        silent = (self.noise / self.scale <= self.tolerance).all()
        return self.is_finite and bool(silent and (spread > 10 * self.tolerance).any())


def computes_in_16_bits(networks: Iterable[nn.Cell], dtypes: Iterable[Any]) -> bool:
    """Whether networks compute in 16 bits, and so round more. `dtypes` : those of weights, accumulators and inputs."""
    if any(dtype in (ms.float16, ms.bfloat16) for dtype in dtypes):
        return True
    return any(
        cell.get_flags().get("fp16")
        or cell.get_flags().get("bf16")
        or str(getattr(cell, "mixed_precision_type", None)).endswith(("FP16", "BF16", "AUTO"))
        for network in networks
        for _, cell in network.cells_and_names()
    )
