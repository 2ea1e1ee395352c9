"""memory_report: known sizes, predictions compared with measurements, the verdict, the table, and bad input."""

from __future__ import annotations

import dataclasses

import mindspore as ms
import pytest
from mindspore import nn

from gaccum_ms import Accumulators, GradAccumulationCell, find_micro_batch_size, memory_report
from gaccum_ms.memory.report import MemoryReport, MemoryRow
from tests.memory.test_search import batch
from tests.support.alone import alone
from tests.support.reference import FEATURES, OPTIMIZERS, make_network


def cell_of(network, **options):
    return GradAccumulationCell(nn.WithLossCell(network, nn.CrossEntropyLoss()), 2, **options)


def report_of(network, *, samples=32, optimizer="momentum", options=None, **arguments) -> MemoryReport:
    cell = cell_of(network, **(options or {}))
    return memory_report(cell, OPTIMIZERS[optimizer](network.trainable_params()), *batch(samples), **arguments)


WEIGHTS = 12 * 16 + 16 + 16 * 5 + 5  # of the reference's dense network


def test_known_sizes_by_hand(pynative):
    options = {"accumulators": Accumulators(ms.bfloat16, compensated=True)}
    report = report_of(make_network("dense"), samples=2, optimizer="adam", options=options)
    assert report.parameters == 4 * WEIGHTS
    assert report.accumulators == 6 * WEIGHTS
    # Two moments, the learning rate, two powers of beta, and the step.
    assert report.optimizer_state == 8 * WEIGHTS + 4 * 4
    assert report.batch == 2 * (FEATURES + 1) * 4


HIDDEN = 400_000  # so that a few samples are enough to measure


def wide_reports() -> tuple[MemoryReport, MemoryReport]:
    """In a new process, because in an old one a trial's memory differs by 100 MB: without a limit, and with one below
    half of the batch."""
    ms.set_context(mode=ms.GRAPH_MODE)
    wide = nn.SequentialCell(nn.Dense(FEATURES, HIDDEN), nn.Tanh(), nn.Dense(HIDDEN, 5))
    whole = report_of(wide, samples=128)
    half, quarter = whole.rows[1:3]
    return whole, report_of(wide, samples=128, memory_limit=(half.peak + quarter.peak) // 2)


@pytest.mark.device("memory_report predicts what is measured", ran="an H100, 2026-11-27")
def test_predicts_what_is_measured():
    """Sizes of 128 and 64 samples are predicted from at most 32."""
    whole, limited = alone(wide_reports)
    assert [(row.micro_size, row.micro_batch_size) for row in whole.rows] == [(2**k, 128 >> k) for k in range(8)]
    assert [row.measured for row in whole.rows] == [True] * 8
    assert [row.measured for row in limited.rows] == [row.fits for row in limited.rows] == [False] * 2 + [True] * 6
    assert limited.fits_from == 4
    smallest = whole.rows[-1]
    for predicted, measured in zip(limited.rows[:2], whole.rows, strict=False):  # by how much it grows
        growth = measured.peak - smallest.peak
        assert predicted.peak - smallest.peak == pytest.approx(growth, rel=0.25), measured
    # At least the values that tanh keeps for its gradient, and the gradient; at most a few more of this size.
    growth = whole.rows[0].peak - smallest.peak
    assert 2 < growth / (127 * HIDDEN * 4) < 8


def test_nothing_fits_a_limit_below_the_framework(pynative):
    report = report_of(make_network("dense"), memory_limit=1_000_000)
    assert report.fits_from is None
    assert [(row.peak, row.measured, row.fits) for row in report.rows] == [(1_000_000, False, False)] * 6


REPORT = MemoryReport(
    parameters=14_800_000, optimizer_state=0, accumulators=14_800_000, batch=1, memory_limit=10**9,
    rows=(MemoryRow(1, 16, 1_054_900_000, False, False), MemoryRow(2, 8, 880_100_000, True, True)),
)  # fmt: skip


def test_prints_a_table():
    assert str(REPORT).splitlines()[-4:] == [
        "micro_size  samples    peak MB             fits",
        "         1       16     1054.9  predicted  no",
        "         2        8      880.1  measured   yes",
        "limit 1000.0 MB: fits from micro_size=2 on",
    ]


def test_sizes_fit_from_where_all_larger_ones_do():
    fits, too_large = REPORT.rows[1], REPORT.rows[0]
    rows = tuple(dataclasses.replace(row, micro_size=2**place) for place, row in enumerate((fits, too_large, fits)))
    assert dataclasses.replace(REPORT, rows=rows).fits_from == 4


OWNER = "For 'memory_report', .*"


@pytest.mark.parametrize(
    ("error", "message", "given"),
    [
        (
            TypeError,
            f"{OWNER}'cell' must be a gaccum_ms.GradAccumulationCell, but got 'Dense'",
            {"cell": nn.Dense(1, 1)},
        ),
        (TypeError, f"{OWNER}must be an nn.Optimizer, but got 'int'", {"optimizer": 3}),
        (ValueError, "axis 0 of all inputs must have the same length", {"batch": (batch(4)[0], batch(6)[1])}),
        (TypeError, f"{OWNER}'memory_limit' must be an int, but got 1.5", {"memory_limit": 1.5}),
    ],
)
def test_bad_arguments(error, message, given):
    network = make_network("dense")
    given = {"cell": cell_of(network), "optimizer": nn.SGD(network.trainable_params()), "batch": batch(32), **given}
    with pytest.raises(error, match=message):
        memory_report(given.pop("cell"), given.pop("optimizer"), *given.pop("batch"), **given)


def test_refuses_modes_in_which_a_rank_cannot_try_alone(parallel_context):
    network = make_network("dense")
    cell, optimizer = cell_of(network), nn.SGD(network.trainable_params(), 0.1)
    parallel_context(parallel_mode="semi_auto_parallel")
    with pytest.raises(RuntimeError, match=r"For 'memory_report', .*'data_parallel', but got 'semi_auto_parallel'"):
        memory_report(cell, optimizer, *batch(4))
    with pytest.raises(RuntimeError, match=r"For 'find_micro_batch_size', .*but got 'semi_auto_parallel'"):
        find_micro_batch_size(cell, optimizer, batch(4))
