"""Counts, several losses, loss scaling and overflow on two ranks with unequal counts, against NumPy.

The oracle below joins all tokens. It uses micro-batches and ranks only to leave dropped micro-batches out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ranks.counted_worker import (
    DECAY,
    FEATURES,
    MOMENTUM,
    RATE,
    SCALE,
    SCENARIOS,
    START,
    Batch,
    Scenario,
    cut,
)
from tests.support.reference import relative_error
from tests.support.two_ranks import Results, case, results_of

pytestmark = pytest.mark.distributed
TOLERANCE = 1e-5


ranks = results_of("counted_worker")


# -- the oracle --------------------------------------------------------------------------------------------------------


def sums(loss: str, batch: Batch, weight: np.ndarray) -> np.ndarray:
    """Sum of the loss over a batch, number of its items, and sum of the gradient, in one vector that adds up."""
    x, y, mask = (value.astype(np.float64) for value in batch)
    if loss == "samples":
        x, y, mask = x[:, :1], y[:, :1], np.ones((len(x), 1))
    items, error = mask.sum(), x @ weight - y
    if loss == "all tokens":
        mask = np.ones_like(mask)
    return np.array([(mask * error**2).sum() / 2, items, *((mask * error)[..., None] * x).sum((0, 1))])


def together(loss: str, scenario: Scenario, batches: list[Batch], weight: np.ndarray) -> tuple[np.ndarray, int]:
    """`sums` of everything that is not dropped, and the number of dropped micro-batches."""
    if not scenario.drops:
        return sum(sums(loss, batch, weight) for batch in batches), 0
    each = [sums(loss, micro_batch, weight) for batch in batches for micro_batch in cut(batch)]
    finite = [one for one in each if np.isfinite(one).all()]
    return sum(finite, np.zeros(2 + FEATURES)), len(each) - len(finite)


def over(total: np.ndarray, count: float, least: float = 0.0) -> np.ndarray:
    count = max(count, least)
    return total / count if count else 0 * total


def expected(scenario: Scenario, rank: int) -> list[dict[str, Any]]:
    """The expected results on `rank` after each window; None for a result that is not defined."""
    weight, moment, updates, scale = np.array(START), np.zeros(FEATURES), 0, SCALE
    losses = scenario.losses
    weights = scenario.options.get("loss_weights", (1.0,) * len(losses))
    least = scenario.options.get("min_count", 0.0)
    max_norm = scenario.options.get("max_grad_norm", np.inf)
    # Without counts, ranks add up their gradients or average them, and each reports its own loss, as in MindSpore.
    counted = scenario.counted
    sums_stay = not counted and scenario.reduction == "sum"
    rows: list[dict[str, Any]] = []
    for window in scenario.windows:
        if window.expect == "error":
            rows.append({**rows[-1], "loss": None, "terms": None, "count": None, "dropped": None, "of_samples": None})
            continue
        with np.errstate(invalid="ignore", over="ignore"):
            both = [together(loss, scenario, window.ranks, weight) for loss in losses]
            own = [together(loss, scenario, [window.ranks[rank]], weight)[0] for loss in losses]
        totals, dropped = [total for total, _ in both], both[0][1]
        x = window.ranks[rank][0].astype(np.float64)
        outputs = {
            "of_samples": x @ weight,
            "own_loss": over(own[0], own[0][1])[0],
        }
        reported = [one if sums_stay else over(one, one[1], least) for one in (totals if counted else own)]
        if window.expect == "update":
            if counted or scenario.drops:
                means = [over(total, total[1], least) for total in totals]
            else:  # the ranks' own means, or sums, averaged: nn.TrainOneStepCell on the same ranks
                each = [[sums(loss, batch, weight) for batch in window.ranks] for loss in losses]
                means = [sum(one if sums_stay else over(one, one[1]) for one in ranks) / 2 for ranks in each]
            factor = 1 if counted or scenario.gradients_mean else 2
            gradient = factor * sum(part * mean[2:] for part, mean in zip(weights, means, strict=True))
            gradient = gradient * min(1.0, max_norm / np.linalg.norm(gradient))
            moment = MOMENTUM * moment + gradient
            weight = weight - RATE * DECAY**updates * moment
            updates += 1
        terms, counts = np.array([one[0] for one in reported]), np.array([total[1] for total in totals])
        if not counted and not scenario.drops:
            counts = np.array([total[1] for total in own])
        row = {"weight": weight, "moment": moment, "updates": updates, "scale": scale, "dropped": dropped}
        row |= outputs | {"terms": terms, "loss": float(np.dot(weights, terms)), "count": counts.squeeze()}
        if window.expect == "overflow" and not scenario.drops:
            row |= {"terms": None, "loss": None, "count": None}  # not finite, as in MindSpore
        if window.expect == "overflow" or dropped:
            scale /= 2
        rows.append({**row, "scale_after": scale})
    return rows


def check(results: Results, scenario: Scenario, rank: int) -> None:
    """Check that each window has the expected effects, and no others."""
    for index, (window, wanted) in enumerate(zip(scenario.windows, expected(scenario, rank), strict=True)):
        assert results["error"][index] == (window.expect == "error"), window.name
        if scenario.scaled and window.expect != "error":
            assert results["overflow"][index] == (window.expect == "overflow"), window.name
            assert results["scale"][index] == wanted["scale"], window.name
        for name in ("updates", "scale_after", "dropped"):
            if name in results and wanted[name] is not None:
                assert results[name][index] == wanted[name], (window.name, name, results[name][index], wanted[name])
        for name in ("weight", "moment", "loss", "terms", "count", "own_loss", "of_samples"):
            if name in results and wanted[name] is not None:
                error = relative_error(results[name][index], wanted[name])
                assert error < TOLERANCE, (window.name, name, error, results[name][index], wanted[name])
        assert not results["accumulators"][index].any(), window.name
        if window.expect != "update":
            for name in ("weight", "state"):
                np.testing.assert_array_equal(results[name][index], results[name][index - 1], err_msg=window.name)


# -- the tests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCENARIOS)
def test_equals_all_tokens_in_one_batch(ranks, name):
    for rank in range(2):
        check(case(ranks[rank], name), SCENARIOS[name], rank)
    for key in ("weight", "state"):
        np.testing.assert_array_equal(case(ranks[0], name)[key], case(ranks[1], name)[key])


def test_one_reduction_per_update(ranks):
    """One buffer has the weight's gradient and the window's three sums. Two losses' counts are sent before the loop."""
    for results in ranks:
        assert results["reductions/one loss"].tolist() == [FEATURES + 3] * 2
        assert results["reductions/two losses"].tolist() == [2, FEATURES + 2] * 2
