"""The cases of test_counted_ranks.py on ranks (support/ranks.py), and their scenarios: the data for training here, and
for the calculation in the test.

Each scenario calls one step on a series of windows, so that the state after a window (momentum, the learning rate's
step, accumulators, the loss scale) affects the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import get_rank

from gaccum_ms import CountMask, TrainOneStepWithGradAccumulationCell
from tests.ranks.cases import NotedAllReduce, named, set_up
from tests.support.reference import as_numpy, make_step, vector
from tests.support.two_ranks import Results

SAMPLES = (7, 5)  # of each rank; in three micro-batches 3 + 3 + 1 and 2 + 2 + 1
MICRO_SIZE, LENGTH, FEATURES = 3, 4, 3
START = (0.5, -1.0, 0.25)
RATE, DECAY, MOMENTUM = 0.1, 0.9, 0.9  # the learning rate of update t is RATE * DECAY^t
SCALE = 2.0**40

Batch = tuple[np.ndarray, ...]


def cut(batch: Batch) -> list[Batch]:
    """A rank's micro-batches."""
    size = -(-len(batch[0]) // MICRO_SIZE)
    return [tuple(value[start : start + size] for value in batch) for start in range(0, len(batch[0]), size)]


class Tokens(nn.Cell):
    """Squared errors of y ~ x w: the mean over tokens weighted by a mask, the mean over first tokens, or both; or the
    sum over all tokens, which a detector divides by the sum of the mask.

    The mean over a mask of zeros is 0 / 0, as it is in user code.
    """

    def __init__(self, losses: tuple[str, ...], reduction: str, has_outputs: bool = False) -> None:
        super().__init__()
        self.weight = ms.Parameter(Tensor(START, ms.float32), name="weight")
        self.losses = losses
        self.mean = reduction == "mean"
        self.ratio = reduction == "ratio"
        self.has_outputs = has_outputs

    def construct(self, x, y, mask):
        result = self.the_losses(x, y, mask)
        if self.ratio:
            count = mask.sum()
            # NaN if nothing counts, unless the sum is over all tokens
            result = (result if "all tokens" in self.losses else result / count * count, count)
        if self.has_outputs:
            result = (*result, result[0]) if self.ratio else (result, result)
            result = (*result, (x * self.weight).sum(-1))
        return result

    def the_losses(self, x, y, mask):
        result = ()
        for loss in self.losses:
            if loss == "all tokens":
                mask = ops.ones_like(mask)
            result = (*result, self.samples(x, y) if loss == "samples" else self.tokens(x, y, mask))
        return result if len(self.losses) > 1 else result[0]

    def tokens(self, x, y, mask):
        total = (mask * ops.square((x * self.weight).sum(-1) - y)).sum() / 2
        return total / mask.sum() if self.mean else total

    def samples(self, x, y):
        total = ops.square((x[:, 0] * self.weight).sum(-1) - y[:, 0]).sum() / 2
        return total / x.shape[0] if self.mean else total


class Window(NamedTuple):
    """The batches of both ranks, and the expected result: "update", "skip", "overflow" or "error"."""

    name: str
    ranks: tuple[Batch, Batch]
    expect: str = "update"


@dataclass(frozen=True)
class Scenario:
    windows: tuple[Window, ...]
    options: dict[str, Any] = field(default_factory=dict)
    losses: tuple[str, ...] = ("tokens",)
    gradients_mean: bool = False
    mode: str = "pynative"
    scaled: bool = False

    @property
    def reduction(self) -> str:
        return self.options.get("reduction", "mean")

    @property
    def counted(self) -> bool:
        return "count" in self.options or self.reduction == "ratio"

    @property
    def has_outputs(self) -> bool:
        return self.options.get("aux", False)

    @property
    def drops(self) -> bool:
        return self.options.get("overflow") == "drop_micro_batch"


def plain(seed: int) -> tuple[Batch, Batch]:
    """Tokens whose weights differ much: rank 0 is mostly padding, rank 1 heavy. Every micro-batch counts something."""
    random = np.random.default_rng(seed)
    ranks = []
    for samples, weights in zip(SAMPLES, ((0.0, 0.0, 0.5, 1.0), (0.0, 1.0, 2.0, 3.0)), strict=True):
        x = random.normal(size=(samples, LENGTH, FEATURES)).astype(np.float32)
        y = random.normal(size=(samples, LENGTH)).astype(np.float32)
        mask = random.choice(np.array(weights, np.float32), size=(samples, LENGTH))
        mask[:, 0] = weights[-1]
        ranks.append((x, y, mask))
    return tuple(ranks)


def masked(seed: int, where: list[tuple[int, int]], value: float = 0.0) -> tuple[Batch, Batch]:
    """`plain`, with `value` as the weight of all tokens of these (rank, micro-batch)."""
    ranks = plain(seed)
    for rank, micro in where:
        cut(ranks[rank])[micro][2][:] = value
    return ranks


def poisoned(seed: int, where: list[tuple[int, int]], value: float) -> tuple[Batch, Batch]:
    """`plain`, with `value` in one input of the first token, which counts, of these (rank, micro-batch)."""
    ranks = plain(seed)
    for rank, micro in where:
        cut(ranks[rank])[micro][0][0, 0, 1] = value
    return ranks


ALL = [(rank, micro) for rank in range(2) for micro in range(MICRO_SIZE)]


def counted_windows(of_nothing: str) -> tuple[Window, ...]:
    """Counts of zero, in some micro-batches up to all, and invalid counts. The last window shows any remains."""
    return (
        Window("a micro-batch of each rank counts 0", masked(2, [(0, 0), (1, 2)])),
        Window("rank 0 counts 0", masked(3, ALL[:3])),
        Window("rank 1 counts 0", masked(4, ALL[3:])),
        Window("all count 0", masked(5, ALL), of_nothing),
        Window("after nothing", plain(6)),
        Window("negative on rank 1", masked(7, [(1, 1)], -1.0), "error"),
        Window("NaN on rank 0", masked(8, [(0, 2)], np.nan), "error"),
        Window("infinite on rank 1", masked(9, [(1, 0)], np.inf), "error"),
        Window("after errors", plain(10)),
    )


def overflow_windows(places: list[tuple[int, int]], expect: str = "overflow") -> tuple[Window, ...]:
    """Windows with infinity and with NaN at each place, and sound windows between them."""
    windows = [Window("first", plain(0))]
    for number, (rank, micro) in enumerate(places):
        for value in (np.inf, np.nan):
            name = f"{value} in micro-batch {micro} of rank {rank}"
            windows.append(Window(name, poisoned(20 + number, [(rank, micro)], value), expect))
        windows.append(Window(f"after rank {rank}, {micro}", plain(40 + number)))
    return tuple(windows)


def dropped_windows(places: list[tuple[int, int]]) -> tuple[Window, ...]:
    everything = Window("all overflow", poisoned(60, ALL, np.nan), "overflow")
    rank = Window("all of rank 0 overflows", poisoned(61, ALL[:3], np.inf))
    both = Window("one of each rank overflows", poisoned(62, [(0, 1), (1, 0)], np.inf))
    return (*overflow_windows(places, "update"), everything, rank, both, Window("last", plain(63)))


MASK = {"count": CountMask()}
BOTH = {"count": (CountMask(), None), "loss_weights": (1.0, 0.5)}
DROP = {"overflow": "drop_micro_batch"}
RATIO = {"reduction": "ratio"}
TWO = ("tokens", "samples")
FEW = [(0, 1), (1, 2)]
SOUND = (Window("first", plain(0)), Window("second", plain(1)))
SKIPS, UPDATES = counted_windows("skip"), counted_windows("update")

SCENARIOS: dict[str, Scenario] = {
    "count": Scenario(SKIPS, MASK, gradients_mean=True),
    "sum": Scenario(SOUND, {"reduction": "sum"}),
    # More than no positives, less than those of a window. A window without any item updates, too.
    "detector, ratio": Scenario(UPDATES[:5], {**RATIO, "min_count": 4.0}, ("all tokens",), scaled=True),
    # If no token counts, the loss over samples still updates.
    "two losses": Scenario(UPDATES, BOTH, TWO),
    "ratio, clipped, with outputs": Scenario(
        overflow_windows(FEW), {**RATIO, "max_grad_norm": 0.1, "aux": True}, scaled=True
    ),
    "drop micro-batch": Scenario(dropped_windows(FEW) + SKIPS[3:], {**MASK, **DROP}, mode="graph", scaled=True),
    "drop micro-batch of samples, mean over ranks": Scenario(
        dropped_windows([])[:4], DROP, ("samples",), gradients_mean=True, scaled=True
    ),
}


def step_of(scenario: Scenario) -> TrainOneStepWithGradAccumulationCell:
    network = Tokens(scenario.losses, scenario.reduction, scenario.has_outputs)
    rate = nn.ExponentialDecayLR(RATE, DECAY, 1)
    scale = nn.DynamicLossScaleUpdateCell(SCALE, 2, 1000) if scenario.scaled else None
    momentum = lambda weights: nn.Momentum(weights, rate, MOMENTUM)  # noqa: E731
    return make_step(network, momentum, scale, micro_size=MICRO_SIZE, **scenario.options)


def play(scenario: Scenario, rank: int) -> Iterator[dict[str, Any]]:
    """The visible results of each window."""
    set_up(scenario.mode, scenario.gradients_mean)
    step = step_of(scenario)
    for window in scenario.windows:
        row: dict[str, Any] = {"loss": np.nan, "error": False}
        try:
            outputs = step(*map(Tensor, window.ranks[rank]))
        except ValueError as error:
            if "'count'" not in str(error) and "denominator" not in str(error):
                raise
            row["error"] = True
        else:
            names = ("loss", "overflow", "scale") if scenario.scaled else ("loss",)
            names += ("own_loss", "of_samples") if scenario.has_outputs else ()
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            row |= {name: output.asnumpy() for name, output in zip(names, outputs, strict=True)}
        yield row | look(step, scenario)


def look(step: TrainOneStepWithGradAccumulationCell, scenario: Scenario) -> dict[str, Any]:
    optimizer = step.optimizer
    state = [as_numpy(p).ravel() for p in sorted(optimizer.get_parameters(), key=lambda p: p.name)]
    values = {
        "weight": as_numpy(step.network.weight),
        "moment": as_numpy(optimizer.moments[0]),
        "updates": as_numpy(optimizer.global_step).ravel()[0],
        "state": np.concatenate(state),
        "accumulators": vector(step.accu_grads),
    }
    if scenario.scaled:
        values["scale_after"] = as_numpy(step.scale_sense).ravel()[0]
    if len(scenario.losses) > 1:
        values["terms"] = as_numpy(step.loss_terms)
    if scenario.drops:
        values["dropped"] = as_numpy(step.dropped_micro_batches)
    if scenario.drops or scenario.counted:
        values["count"] = as_numpy(step.window_count)
    return values


def all_reductions(out: Path) -> Results:
    """The size of each buffer that is sent to the other rank."""
    set_up(gradients_mean=False)
    results = {}
    for name, scenario in (("one loss", Scenario(SOUND, MASK)), ("two losses", Scenario(SOUND, BOTH, TWO))):
        step = step_of(scenario)
        reducers = [NotedAllReduce(one) for one in (step.window.ledger.sum_over_ranks.reducer, step.grad_reducer)]
        for window in scenario.windows:
            step(*map(Tensor, window.ranks[get_rank()]))
        assert not reducers[1].sizes
        results[name] = reducers[0].sizes
    return named("reductions", results)


# -- all cases ---------------------------------------------------------------------------------------------------------


def played(name: str) -> Callable[[Path], Results]:
    def case(out: Path) -> Results:
        rows, results = list(play(SCENARIOS[name], get_rank())), {}
        for key in {key for row in rows for key in row}:
            first = next(row[key] for row in rows if key in row)
            missing = np.full_like(first, np.nan, dtype=np.float64)  # a window that raised has no outputs
            results[f"{name}/{key}"] = np.stack([np.asarray(row.get(key, missing), np.float64) for row in rows])
        return results

    return case


CASES: dict[str, Callable[[Path], Results]] = {
    **{name: played(name) for name in SCENARIOS},
    "reductions": all_reductions,
}
