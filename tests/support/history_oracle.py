"""What each call of a random history must do, in NumPy and float64: forward, backward, windows, transforms, optimizers.

It uses no code of the project, and is written by what the documentation says. A state is the step's Parameters by name.
`Oracle` keeps only what a state does not show: the micro-batches of the open window, as a list.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import ops

Arrays = list[np.ndarray]
Inputs = tuple[np.ndarray, ...]
State = dict[str, np.ndarray]
IGNORED = -100
OWN = "gaccum_ms."

# By loss: the cell's `reduction` , and the default count of each of its losses (of COUNTS).
LOSSES: dict[str, tuple[str, tuple[str | None, ...]]] = {
    "mean": ("mean", (None,)),
    "sum": ("sum", (None,)),
    "masked": ("mean", ("mask",)),
    "masked sum": ("sum", ("mask",)),
    "ratio": ("ratio", (None,)),
    "focal": ("sum", ("mask",)),  # the sum over all samples, divided by those that the mask counts
    "focal ratio": ("ratio", (None,)),
    "two means": ("mean", (None, None)),
    "two masked": ("mean", ("mask", None)),
    "two sums": ("sum", ("mask", "rows")),
}
# Options of a Setup that go with all others when they have their defaults.
DISPENSABLE = ("steps", "shared", "loss_weights", "min_count", "max_norm", "dtype", "compensated", "drops", "noise")
DISPENSABLE += ("aux", "scale", "optimizer", "rates", "decay", "gradients_mean")
EPSILON = {"float32": 1e-7, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(frozen=True)
class Setup:
    """What is trained, and with what options. `accumulator` : by a GradAccumulator, whose gradients are random."""

    body: str = "linear"  # or "tanh", "tokens"
    loss: str = "mean"
    counts: tuple[str | None, ...] = (None,)
    micro_size: int | None = None
    micro_batch_size: int | None = None
    steps: int = 1
    split: str | None = None  # or "uneven", "tokens"
    shared: bool = False
    loss_weights: tuple[float, ...] | None = None
    min_count: float | None = None
    max_norm: float | None = None
    transforms: tuple[tuple[Any, ...], ...] = ()
    dtype: str = "float32"  # of the accumulators
    compensated: bool = False
    drops: bool = False
    noise: bool = False
    aux: bool = False
    scale: tuple[float, ...] | None = None  # (value,), or (value, factor, window) of one that adjusts itself
    optimizer: str = "sgd"  # or "momentum", "adam", "adam_weight_decay"
    rates: tuple[float, ...] = (0.05,)  # of the updates, again and again; one: constant
    decay: float = 0.0
    mode: str = "pynative"  # or "graph", "jit"
    gradients_mean: bool = True
    accumulator: bool = False

    def __str__(self) -> str:
        default = Setup()
        return ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if value != getattr(default, name))

    def without(self, names: Collection[str]) -> Setup:
        """The set-up with the defaults of these options, and without the transforms of these names."""
        default = {name: getattr(Setup(), name) for name in names if name in DISPENSABLE}
        transforms = tuple(link for link in self.transforms if link[0] not in names)
        return replace(self, transforms=transforms, **default)

    @property
    def reduction(self) -> str:
        return LOSSES[self.loss][0]

    @property
    def counted(self) -> bool:
        """Whether micro-batches weigh by what the user counts."""
        return self.reduction == "ratio" or any(self.counts)

    @property
    def bare_sum(self) -> bool:
        return self.reduction == "sum" and not any(self.counts)

    def link(self, name: str) -> tuple[Any, ...] | None:
        return next((link for link in self.transforms if link[0] == name), None)

    @property
    def front_norm(self) -> float | None:
        """The norm to which the finished gradient is clipped first."""
        first = self.transforms[0] if self.transforms else ("",)
        return self.max_norm if self.max_norm is not None else first[1] if first[0] == "norm" else None


# -- networks: per item, the loss and how its gradient comes back ------------------------------------------------------


def shapes_of(body: str) -> dict[str, tuple[int, ...]]:
    return {
        "linear": {"w": (3,), "b": (1,)},
        "tanh": {"hidden": (3, 4), "out": (4,)},
        "tokens": {"table": (7, 3), "out": (3, 5)},
    }[body]


def _linear(weights: Arrays, x: np.ndarray) -> tuple[np.ndarray, Callable]:
    return x @ weights[0] + weights[1], lambda d: [d @ x, d.sum(keepdims=True)]


def _tanh(weights: Arrays, x: np.ndarray) -> tuple[np.ndarray, Callable]:
    # MindSpore's operator: near 1 it errs by up to 1e-4, which is nearly all of its derivative there.
    hidden = ops.tanh(ms.Tensor(x @ weights[0], ms.float32)).asnumpy().astype(np.float64)
    return hidden @ weights[1], lambda d: [x.T @ (d[:, None] * weights[1] * (1 - hidden**2)), d @ hidden]


def _tokens(weights: Arrays, tokens: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, Callable]:
    """The losses of cross entropy, and what comes back of their gradient."""
    table, out = weights
    logits = table[tokens] @ out
    logits = logits - logits.max(-1, keepdims=True)
    log = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    one_hot = np.eye(out.shape[1])[np.where(labels == IGNORED, 0, labels)]

    def back(d: np.ndarray) -> Arrays:
        d = (np.exp(log) - one_hot) * d[..., None]
        to_table = np.zeros_like(table)
        np.add.at(to_table, tokens, d @ out.T)
        return [to_table, np.einsum("nle,nlc->ec", table[tokens], d)]

    return -(log * one_hot).sum(-1), back


COUNTS: dict[str, Callable[[Inputs], float]] = {
    "mask": lambda inputs: float(inputs[-1].sum()),
    "labels": lambda inputs: float((inputs[-1] != IGNORED).sum()),
    "rows": lambda inputs: float(len(inputs[0])),
}


@dataclass
class Part:
    """A micro-batch: of each loss the count, and value and gradient times this count; of a sum these themselves."""

    counts: np.ndarray
    values: np.ndarray
    gradients: list[Arrays]  # of each loss
    rows: np.ndarray | None = None
    scalar: float = 0.0
    dropped: bool = False

    @property
    def bad(self) -> bool:
        return bool(np.isnan(self.counts).any())


def part_of(setup: Setup, weights: Arrays, inputs: Inputs) -> Part:
    x, rest = inputs[0], [one.astype(np.float64) for one in inputs[1:]]
    samples = len(x)
    if setup.body == "tokens":
        mask = (inputs[-1] != IGNORED).astype(np.float64)
        rows, back = _tokens(weights, x, inputs[-1])
        errors, slope = rows, np.ones_like(rows)
        rows = rows * mask
    else:
        x = x.astype(np.float64) * (rest.pop(0) if setup.shared else 1.0)
        y, mask = rest
        rows, back = {"linear": _linear, "tanh": _tanh}[setup.body](weights, x)
        errors, slope = (rows - y) ** 2 / 2, rows - y
    weight = {  # of each item in each loss
        "mean": [np.ones(samples) / samples],
        "sum": [np.ones_like(errors)],
        "masked": [mask / mask.sum()],
        "masked sum": [mask],
        "ratio": [mask],
        "focal": [np.ones_like(errors)],
        "focal ratio": [np.ones_like(errors)],
        "two means": [np.ones(samples) / samples] * 2,
        "two masked": [mask / mask.sum(), np.ones(samples) / samples],
        "two sums": [mask, np.ones(samples)],
    }[setup.loss]
    by_default = 1 if setup.accumulator else samples  # batches of a GradAccumulator have equal weight
    counts = np.array([COUNTS[count](inputs) if count else by_default for count in setup.counts], float)
    if setup.reduction == "ratio":
        counts = np.array([mask.sum()])
    counts[~((counts >= 0) & (counts < np.inf))] = np.nan
    second = (rows, np.ones_like(rows))  # the second of two losses is the mean prediction
    values, gradients = [], []
    for term, of_items in enumerate(weight):
        loss, d = ((errors, slope), second)[term]
        value, gradient = (loss * of_items).sum(), back(of_items * d)
        # A mean over nothing is left out, and so is a sum over nothing that is no number.
        of_no_items = counts[term] == 0 and not setup.bare_sum
        left_out = of_no_items and (setup.reduction == "mean" or (np.isnan(value) and not setup.accumulator))
        times = counts[term] if setup.reduction == "mean" else 1.0
        values.append(0.0 if left_out else value * times)
        gradients.append([np.zeros_like(one) if left_out else one * times for one in gradient])
        scalar = 0.0 if left_out else float(rows.mean()) * times
    part = Part(counts, np.array(values), gradients, rows, scalar)
    if setup.drops and not part.bad and not (np.isfinite(part.values).all() and _finite(gradients[0])):
        part.dropped = True
    return part


def _finite(arrays: Arrays) -> bool:
    return all(np.isfinite(one).all() for one in arrays)


def cut(setup: Setup, batch: Inputs) -> list[Inputs]:
    """The micro-batches of a batch. Those of MaxTokens add up to the whole batch."""
    samples = len(batch[0])
    if setup.split == "tokens" or setup.accumulator:
        return [batch]
    if setup.split == "uneven":
        bounds = uneven_bounds(samples)
    else:
        size = setup.micro_batch_size or -(-samples // (setup.micro_size or 1))
        bounds = [*range(0, samples, size), samples]
    shared = (1,) if setup.shared else ()
    return [
        tuple(one if place in shared else one[start:end] for place, one in enumerate(batch))
        for start, end in itertools.pairwise(bounds)
    ]


def uneven_bounds(samples: int) -> list[int]:
    """The cuts of the tests' own function as `split` : micro-batches of 2, 1, 3, 2, 1, 3, ... samples."""
    bounds, sizes = [0], (2, 1, 3)
    while bounds[-1] < samples:
        bounds.append(min(samples, bounds[-1] + sizes[len(bounds) % 3]))
    return bounds


# -- optimizers --------------------------------------------------------------------------------------------------------

ADAM_EPS = 0.01  # large, so that a rounding error of a small gradient changes little
BETA1, BETA2 = float(np.float32(0.9)), float(np.float32(0.999))  # 1 - 0.999 differs in float32
MOMENTS = {"adam": ("moment1.", "moment2."), "adam_weight_decay": ("adam_m.", "adam_v.")}


def updated(setup: Setup, names: Sequence[str], state: State, gradient: Arrays) -> State:
    """The weights and the optimizer's state after an update."""
    step = int(state["global_step"].reshape(-1)[0])
    rate = setup.rates[step % len(setup.rates)]
    new: State = {"global_step": state["global_step"] + 1}
    if setup.optimizer == "adam":
        new |= {"beta1_power": state["beta1_power"] * BETA1, "beta2_power": state["beta2_power"] * BETA2}
    for name, one in zip(names, gradient, strict=True):
        weight = state[name]
        if setup.optimizer != "adam_weight_decay":
            one = one + setup.decay * weight
        if setup.optimizer == "sgd":
            new[name] = weight - rate * one
        elif setup.optimizer == "momentum":
            moment = new["moments." + name] = 0.9 * state["moments." + name] + one
            new[name] = weight - rate * moment
        else:
            of_first, of_second = (prefix + name for prefix in MOMENTS[setup.optimizer])
            first = new[of_first] = BETA1 * state[of_first] + (1 - BETA1) * one
            second = new[of_second] = BETA2 * state[of_second] + (1 - BETA2) * one**2
            if setup.optimizer == "adam":
                rate_now = rate * np.sqrt(1 - new["beta2_power"]) / (1 - new["beta1_power"])
                new[name] = weight - rate_now * first / (np.sqrt(second) + ADAM_EPS)
            else:
                new[name] = weight - rate * (first / (np.sqrt(second) + ADAM_EPS) + setup.decay * weight)
    return new


# -- transforms --------------------------------------------------------------------------------------------------------


def norm_of(gradient: Arrays) -> float:
    return float(np.sqrt(sum((one**2).sum() for one in gradient)))


def clipped(gradient: Arrays, limit: float) -> Arrays:
    return [one * limit / np.maximum(norm_of(gradient), limit) for one in gradient]


def finished_update(setup: Setup, names: Sequence[str], state: State, gradient: Arrays) -> State:
    """What changes where an update is not forbidden by an overflow: the chain of transforms, and the optimizer."""
    new: State = {}
    if setup.max_norm is not None:
        gradient = clipped(gradient, setup.max_norm)
    allowed = True
    for kind, *values in setup.transforms:
        if kind == "norm":
            gradient = clipped(gradient, values[0])
        elif kind == "value":
            gradient = [np.where(np.isnan(one), one, np.clip(one, values[0], values[1])) for one in gradient]
        elif kind == "half":
            gradient = [one / 2 for one in gradient]
        elif kind == "spikes":
            seen, allowed = _judged(values, state, norm_of(gradient))
            new |= seen
    if not allowed:
        return new
    new |= updated(setup, names, state, gradient)
    new[OWN + "update_count"] = state[OWN + "update_count"] + 1
    average = setup.link("average")
    if average is not None:
        number = state[OWN + "averaged_updates"] + 1
        keeps = min(average[1], (1 + number) / (10 + number)) if average[2] else average[1]
        for name in names:
            before = begun_average(state, name)
            new[OWN + "average." + name] = keeps * before + (1 - keeps) * new[name]
        new[OWN + "averaged_updates"] = number
    return new


def begun_average(state: State, name: str) -> np.ndarray:
    """The average of a weight: before the first update the weight, but for what was written."""
    average = state[OWN + "average." + name]
    not_written = np.isnan(average) & (state[OWN + "averaged_updates"] == 0)
    return np.where(not_written, state[name], average)


def _judged(values: Sequence[Any], state: State, norm: float) -> tuple[State, bool]:
    """The record of SkipSpikes after a norm, and whether the update is allowed."""
    factor, fixed, history, warmup = values
    norms, entered = state[OWN + "judged_norms"].copy(), int(state[OWN + "judged_updates"])
    known = norms[: min(entered, history)]
    limit = fixed
    if entered >= warmup and np.median(known) > 0:
        limit = min(fixed, factor * np.median(known))
    allowed = bool(norm <= limit)
    if np.isfinite(norm):
        norms[entered % history] = norm
        entered += 1
    skipped = state[OWN + "skipped_updates"] + (not allowed)
    names = ("judged_norms", "judged_updates", "judged_norm", "skipped_updates")
    return dict(zip((OWN + name for name in names), (norms, entered, norm, skipped), strict=True)), allowed


def adjusted_scale(setup: Setup, state: State, overflow: bool) -> State:
    """The loss scale after a window, as MindSpore's cell documents it."""
    _, factor, window = setup.scale
    now, last = state["current_iterator_step"], state["last_overflow_iterator_step"]
    grows = now - last >= window
    scale = state[OWN + "scale_sense"]
    scale = np.maximum(scale / factor, 1.0) if overflow else scale * factor if grows else scale
    last = now if overflow or grows else last
    return {OWN + "scale_sense": scale, "current_iterator_step": now + 1, "last_overflow_iterator_step": last}


# -- windows -----------------------------------------------------------------------------------------------------------


@dataclass
class Expected:
    """The state and this rank's outputs after a call. Entries of `tolerance` allow more than float32's rounding."""

    state: State
    tolerance: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)  # names that nothing is known of

    def change(self, values: State) -> None:
        self.state |= {name: np.asarray(value, float) for name, value in values.items()}


class Oracle:
    """The windows of all ranks."""

    def __init__(self, setup: Setup, names: Sequence[str], ranks: int, spans: bool) -> None:
        self.setup, self.names, self.spans = setup, list(names), spans
        self.windows: list[list[list[Part]]] = [[] for _ in range(ranks)]  # of each rank, its batches' micro-batches
        self.steps = 0  # batches in the open window, once it has one
        self.own_losses = spans and setup.split is None  # a call returns its own batch's mean
        self.joined = False  # whether the open window had begun on another number of ranks
        self.rounding = 0.0  # of the accumulators, in the open window
        self.held = False  # whether windows go on past their last batch

    @property
    def ranks(self) -> int:
        return len(self.windows)

    @property
    def position(self) -> int:
        return max(map(len, self.windows))

    def weights(self, state: State) -> Arrays:
        return [state[name] for name in self.names]

    def clear(self) -> None:
        self.windows, self.joined, self.rounding = [[] for _ in self.windows], False, 0.0

    def on(self, ranks: int) -> None:
        """Continue on another number of ranks: the first one has all micro-batches of the open window."""
        if ranks == self.ranks:
            return
        places, self.joined = range(self.position), True
        batches = [
            [part for window in self.windows for part in (window[place : place + 1] or [[]])[0]] for place in places
        ]
        self.windows = [batches, *([[] for _ in batches] for _ in range(ranks - 1))]

    def train(self, state: State, batches: Sequence[list[Part] | None], rank: int) -> Expected:
        """One batch on each rank; None: this rank is not called. The state is that of `rank` ."""
        setup = self.setup
        expected = Expected(dict(state))
        bad = [parts is not None and any(part.bad for part in parts) for parts in batches]
        if setup.accumulator and any(bad):  # refused before anything is added
            expected.outputs["raises"] = bad[rank]
            return expected
        if not self.position:
            self.steps = int(state[OWN + "accumulation_steps"]) if self.spans else 1
        for window, parts, is_bad in zip(self.windows, batches, bad, strict=True):
            if parts is not None:
                window.append([] if self._leaves_out() and is_bad else parts)
        own = batches[rank]
        if own is None:
            return expected
        self.rounding = max(self.rounding, 0.0 if setup.compensated else EPSILON[setup.dtype])
        expected.change({OWN + "batch_count": state[OWN + "batch_count"] + 1})
        if bad[rank] and self._leaves_out():
            own = []
        kept = [part for part in own if not part.dropped]
        count = float(sum(part.counts[0] for part in kept))
        loss = self.mean(sum(part.values[0] for part in kept), count)
        scalar = self.mean(sum(part.scalar for part in kept), count)
        expected.outputs = {"loss": loss, "overflow": False, "scale": state.get(OWN + "scale_sense")}
        expected.outputs |= {"updated": False, "raises": bad[rank] if self.spans else any(bad)}
        if setup.aux:
            expected.outputs["rows"] = np.concatenate([part.rows for part in batches[rank]])
        if setup.split != "tokens":  # a mean over a micro-batch of MaxTokens is also one over its padding
            expected.outputs["scalar"] = scalar
        expected.tolerance["loss"] = _of(loss)
        if self.spans:
            expected.change({OWN + "window_position": len(self.windows[rank]), OWN + "window_steps": self.steps})
        if not self.spans or (len(self.windows[rank]) >= self.steps and not self.held):
            self.finish(expected, rank)
        return expected

    def _leaves_out(self) -> bool:
        """Whether a batch with a bad count is left out of its window, and not the window out of training."""
        setup = self.setup
        return self.spans and setup.split is None and not (setup.aux or setup.reduction == "ratio")

    def mean(self, value: float, count: float) -> float:
        """A sum over micro-batches, divided as the loss is."""
        divisor = 1.0 if self.setup.bare_sum else max(self.setup.min_count or 0.0, count)
        return value / divisor if divisor > 0 else 0.0

    def finish(self, expected: Expected, rank: int) -> None:
        """The end of a window on all ranks: reduce, divide, transform, update."""
        setup, state = self.setup, expected.state
        parts = [[part for batch in window for part in batch] for window in self.windows]
        kept = [[part for part in some if not part.dropped] for some in parts]
        everyone = [part for some in kept for part in some]
        dropped = sum(map(len, parts)) - len(everyone)
        terms = len(setup.counts)
        equal = not (self.spans or setup.counted or setup.drops)  # each rank has its own mean, of equal weight
        totals = sum((part.counts for part in everyone), np.zeros(terms))
        divided = [max(setup.min_count or 0.0, total) for total in totals]
        gradient, size = self._gradient(state, kept, divided, equal)
        finite, bad = _finite(gradient), bool(np.isnan(totals).any())
        counted = not bad and (equal or max(divided) > 0)
        overflow = (setup.scale is not None or setup.drops) and (not finite or (dropped > 0 and not totals[0] > 0))

        seen = everyone if setup.counted else kept[rank]  # by what a rank reports
        counts, values = (sum((getattr(part, of) for part in seen), np.zeros(terms)) for of in ("counts", "values"))
        losses = [self.mean(value, count) for value, count in zip(values, counts, strict=True)]
        loss = float(np.dot(setup.loss_weights or (1.0,) * terms, losses))
        records: State = {}
        if terms > 1:
            records |= {"window_count": counts, "loss_terms": np.array(losses)}
        elif not equal:
            records |= {"window_count": totals[0], "dropped_micro_batches": dropped}
        if self.spans:
            records |= {"window_position": 0.0, "window_loss": loss, "window_batches": len(self.windows[rank])}
        if setup.front_norm is not None or setup.noise:
            records["grad_norm"] = norm_of(gradient)
        expected.change({OWN + name: value for name, value in records.items()})

        low = self.rounding * (2 + max(map(len, parts)))
        wrong = (2e-5 + low) * size + (1e-5 if setup.dtype != "float32" else 1e-7)  # what rounding may do to it
        # Of norms, which an equal change of all elements may hardly change.
        expected.tolerance |= {OWN + name: 8 * wrong for name in ("grad_norm", "judged_norm", "judged_norms")}
        expected.tolerance |= {OWN + "window_loss": _of(loss), OWN + "loss_terms": 1e-4}
        if not self.own_losses and self.steps == 1:
            expected.outputs["loss"], expected.tolerance["loss"] = loss, _of(loss)
        expected.outputs |= {"overflow": overflow, "updated": False}
        if setup.split is not None:  # a bad count is found when it reaches the total
            expected.outputs["raises"] = bad
        if bad:
            expected.outputs = {"raises": expected.outputs.get("raises")}
        if not counted:  # there is nothing to divide by
            expected.unknown |= {OWN + name for name in ("grad_norm", *("window_loss", "window_count") * bad)}
        if setup.noise and (self.ranks == 1 or setup.counted) and setup.split is None and not (bad or self.joined):
            known = finite and sum(divided) == sum(totals)
            expected.outputs["noise"] = _noise(everyone, totals[0] if known else 0.0)
        if counted and not overflow:
            self._update(expected, gradient, wrong)
        if setup.scale is not None and len(setup.scale) > 1 and not bad and (counted or overflow or dropped):
            expected.change(adjusted_scale(setup, state, overflow or dropped > 0))
        self.clear()

    def _gradient(
        self, state: State, kept: Sequence[Sequence[Part]], divided: Sequence[float], equal: bool
    ) -> tuple[Arrays, float]:
        """The finished gradient, and the sum of the sizes of its parts, which says how much rounding matters."""
        setup = self.setup
        summed = 1.0 if setup.gradients_mean else float(self.ranks)  # where a sum over ranks is meant
        gradient, size = [np.zeros_like(one) for one in self.weights(state)], 0.0
        for some in kept:
            for term, weight in enumerate(setup.loss_weights or (1.0,) * len(setup.counts)):
                if setup.bare_sum:
                    factor = summed / self.ranks
                elif equal:
                    factor = weight / sum(part.counts[term] for part in some) / self.ranks * summed
                elif setup.counted:
                    factor = weight / divided[term] if divided[term] > 0 else 0.0
                else:
                    factor = summed / divided[term] if divided[term] > 0 else 0.0
                for part in some:
                    gradient = [a + b * factor for a, b in zip(gradient, part.gradients[term], strict=True)]
                    largest = max(np.abs(one).max() for one in part.gradients[term]) * factor
                    size += largest if np.isfinite(largest) else 0.0
        return gradient, size

    def _update(self, expected: Expected, gradient: Arrays, wrong: float) -> None:
        """Expect an update. Its tolerance is what a gradient that is wrong by so much would change."""
        new = finished_update(self.setup, self.names, expected.state, gradient)
        for sign in (-1, 1):
            shifted = [one + sign * wrong for one in gradient]
            other = finished_update(self.setup, self.names, expected.state, shifted)
            if new.keys() != other.keys():  # as near as that to being skipped: both are right
                expected.unknown |= new.keys() | other.keys()
                expected.outputs = {}
                return
            for name in new:
                change = np.nan_to_num(np.abs(np.asarray(other[name]) - np.asarray(new[name])))
                expected.tolerance[name] = np.maximum(expected.tolerance.get(name, 0.0), 2 * change.max())
        expected.change(new)
        expected.outputs["updated"] = OWN + "update_count" in new


def _of(loss: float) -> float:
    """The tolerance of a loss."""
    return 1e-5 + 1e-4 * float(np.nan_to_num(abs(loss), posinf=0.0))


def _noise(parts: Sequence[Part], items: float) -> np.ndarray:
    """Of the micro-batches of all ranks: the sum of their items times the squared norm of their mean gradient, their
    number and their items; and the window's items. Empty, if no estimate is possible."""
    counted = [part for part in parts if part.counts[0] > 0]
    squares = sum(norm_of(part.gradients[0]) ** 2 / part.counts[0] for part in counted)
    if items <= 0 or len(counted) < 2 or not np.isfinite(squares):
        return np.zeros(0)
    return np.array([squares, len(counted), sum(part.counts[0] for part in counted), items])
