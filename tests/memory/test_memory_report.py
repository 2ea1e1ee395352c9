"""memory_report: known sizes, predictions compared with measurements, the verdict, the picture, and bad input."""

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
    report = report_of(make_network("dense"), samples=2, optimizer="adam", options=options, measure=False)
    assert report.parameters == 4 * WEIGHTS
    assert report.accumulators == 6 * WEIGHTS
    # Two moments, the learning rate, two powers of beta, and the step.
    assert report.optimizer_state == 8 * WEIGHTS + 4 * 4
    assert report.batch == 2 * (FEATURES + 1) * 4
    assert report.rank == 0


HIDDEN = 100_000  # so that a few samples are enough to measure


def wide_report() -> MemoryReport:
    """In a new process, because in an old one a trial's memory differs by 100 MB."""
    ms.set_context(mode=ms.GRAPH_MODE)
    wide = nn.SequentialCell(nn.Dense(FEATURES, HIDDEN), nn.Tanh(), nn.Dense(HIDDEN, 5))
    return report_of(wide, samples=256, micro_sizes=[1, 2, 256])


@pytest.mark.device("memory_report predicts what is measured", ran="an H100, 2026-11-27")
def test_predicts_what_is_measured():
    """Sizes of 256 and 128 samples are predicted from at most 64. The update's peak hides the memory of few samples."""
    wide = alone(wide_report)
    assert wide.probed == (1, 2, 4, 8, 16, 32, 64)
    assert [row.micro_batch_size for row in wide.rows] == [256, 128, 1]
    *larger, smallest = wide.rows
    for row in larger:  # by how much it grows above the smallest micro-batches
        growth = row.intermediate_measured - smallest.intermediate_measured
        assert row.intermediate - smallest.intermediate == pytest.approx(growth, rel=0.25), row
    # At least the values that tanh keeps for its gradient, and the gradient; at most a few more of this size.
    growth = larger[0].intermediate_measured - smallest.intermediate_measured
    assert 2 < growth / (255 * HIDDEN * 4) < 8


def test_nothing_fits_a_limit_below_the_framework(pynative):
    report = report_of(make_network("dense"), memory_limit=1_000_000)
    assert report.fits_from is None
    assert str(report).endswith("limit 1.0 MB: nothing fits")
    assert report.probed == ()
    assert all(row.peak >= 1_000_000 and row.peak_measured is None for row in report.rows)


REPORT = MemoryReport(
    rank=0, what="resident memory of the process", parameters=20, optimizer_state=20, accumulators=20, batch=1,
    framework=100, memory_limit=250, probed=(1, 2),
    rows=(MemoryRow(1, 4, 160, None, 301, None, False), MemoryRow(2, 2, 80, 79, 241, 240, True)),
)  # fmt: skip


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
        (ValueError, rf"{OWNER}got \[1, 33\] and a batch of 32 sample", {"micro_sizes": [1, 33]}),
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
