"""Widths and plans, compared with brute force and with the properties of every plan."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gaccum_ms.splitting.token_plan import NOBODY, plan_tokens
from gaccum_ms.splitting.widths import best_widths


def padded(lengths, widths):
    return sum(min(width for width in widths if width >= length) for length in lengths)


@pytest.mark.parametrize("number", [1, 3, 20])
@pytest.mark.parametrize("largest", [None, 30])
def test_no_other_widths_pad_less(number, largest):
    random = np.random.default_rng(number)
    for _ in range(20):
        lengths = random.integers(1, 14, size=random.integers(1, 12))
        widths = best_widths(lengths, number, largest)
        assert len(widths) <= number
        assert list(widths) == sorted(set(widths))
        assert widths[-1] == (largest or lengths.max())
        top = [largest] if largest else []
        choices = itertools.combinations(range(1, 14), min(number - len(top), 13))
        possible = [(*choice, *top) for choice in choices if (*choice, *top)[-1] >= lengths.max()]
        assert padded(lengths, widths) == min(padded(lengths, choice) for choice in possible)


@pytest.mark.parametrize("seed", range(4))
def test_every_sample_is_in_one_row_that_holds_it(seed):
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 33, size=random.integers(1, 60))
    widths = best_widths(lengths, int(random.integers(1, 6)), largest=40)
    plan = plan_tokens(lengths, 40, widths, max_tokens=int(random.integers(40, 200)))
    rows = np.concatenate([rows for _, rows in plan.micro_batches])
    assert sorted(rows[rows != NOBODY]) == list(range(lengths.size))
    np.testing.assert_array_equal(rows[plan.order], np.arange(lengths.size))
    for width, here in plan.micro_batches:
        assert width in widths
        assert here.size == plan.max_tokens // width
        assert (lengths[here[here != NOBODY]] <= width).all()
    partly = [here for _, here in plan.micro_batches if (here == NOBODY).any()]
    assert len(partly) <= 1, "only the last micro-batch of all is filled up"
    tokens = sum(width * here.size for width, here in plan.micro_batches)
    assert plan.padding == pytest.approx(1 - lengths.sum() / tokens)
    assert sum(samples for *_, samples, _ in plan.table()) == lengths.size


def test_a_width_is_left_out_where_it_costs_more_than_it_saves():
    for lengths, widths in (
        ([8] * 7 + [2], [8, 8]),  # there is a row for it anyway
        ([8, 2], [8]),
        ([8] * 4 + [2] * 16, [8, 2]),
    ):
        assert [width for width, _ in plan_tokens(np.array(lengths), 8, (2, 8), 32).micro_batches] == widths


def test_what_is_printed():
    plan = plan_tokens(np.array([8, 8, 8, 8, *[2] * 15]), 8, (2, 8), 32)
    assert str(plan).splitlines() == [
        "  width   rows   micro-batches   samples   padding",
        "      2     16               1        15      6.2%",
        "      8      4               1         4      0.0%",
        "    all                      2        19      3.1%",
        "padded to 8, without a plan: 59.2%",
    ]
