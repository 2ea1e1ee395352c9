"""The benchmark: its arithmetic and verdicts on made-up numbers, and the real command on a tiny setting."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import collectives, report
from benchmarks.controller import Worker, WorkerError
from benchmarks.report import Row, Target

ROOT = Path(__file__).resolve().parents[1]


def cnn_rows(*, seconds: float, growth: int) -> list[Row]:
    """A whole batch of 1 s and 600 bytes, and ours at 16 as asked for; both processes began at 1000 bytes."""
    return [
        Row("cnn", "whole", 1, turns=[[1.0]], first_call=1.0, trains=True, peak=1600, base_peak=1000),
        Row("cnn", "ours", 16, turns=[[seconds]], first_call=1.0, trains=True, peak=1000 + growth, base_peak=1000),
    ]


def verdicts(rows: list[Row], first_calls: dict[int, list[float]]) -> list[str]:
    return [target.line().split("  ")[0] for target in report.targets(rows, {"cnn": first_calls})]


def test_targets_pass_on_good_numbers():
    first_calls = {2: [1.0, 1.2, 9.0], 64: [1.3, 1.1, 1.2]}
    assert verdicts(cnn_rows(seconds=1.05, growth=100), first_calls) == ["PASS", "PASS", "PASS"]


@pytest.mark.parametrize(
    ("rows", "first_calls", "failed"),
    [
        (cnn_rows(seconds=1.0, growth=100), {2: [1.0], 64: [1.16]}, 0),
        (cnn_rows(seconds=1.06, growth=100), {2: [1.0], 64: [1.0]}, 1),
        (cnn_rows(seconds=1.0, growth=101), {2: [1.0], 64: [1.0]}, 2),
    ],
    ids=["first call", "time", "memory"],
)
def test_each_bad_number_fails_its_own_target_alone(rows, first_calls, failed):
    expected = ["PASS"] * 3
    expected[failed] = "FAIL"
    assert verdicts(rows, first_calls) == expected


def test_what_was_not_measured_does_not_pass():
    rows = cnn_rows(seconds=1.0, growth=100)
    rows[0].turns, rows[1].base_peak = [], None
    found = report.targets(rows, {"cnn": {2: [1.0], 64: []}})
    assert not any(target.passed for target in found)
    assert all(target.line().startswith("not measured") for target in found)


def test_a_target_is_met_at_its_limit():
    assert Target("", 1.05, 1.05).passed
    assert not Target("", 1.0501, 1.05).passed


def test_ratio_pairs_the_rounds():
    """The machine halves its speed in the second round: the ratio of each round is 2, and so is their median."""
    whole = Row("mlp", "whole", 1, turns=[[1.0, 1.0, 50.0], [2.0], [1.0]])
    ours = Row("mlp", "ours", 4, turns=[[2.0], [4.0], [2.0, 2.0, 90.0]])
    assert report.time_ratio(ours, whole) == 2.0
    assert ours.seconds == 2.0
    assert report.time_ratio(Row("mlp", "ours", 4, turns=[[2.0]]), whole) is None


def test_table_says_why_a_number_is_missing_and_what_does_not_train():
    rows = [
        Row("mlp", "torch", 4, note="not installed"),
        Row("mlp", "mindspore", 4, turns=[[0.5]], first_call=2.0, trains=False),
    ]
    missing, untrained = report.table(rows).splitlines()[-2:]
    assert missing.endswith("not installed")
    assert missing.split()[-7:-2] == ["-"] * 5
    assert "500.0" in untrained
    assert untrained.endswith("NO")


def test_a_worker_that_fails_or_hangs_becomes_a_note():
    with pytest.raises(WorkerError, match=r"failed: .*no_such_way"):
        Worker("no_such_way", "mlp", 1, 8, limit=60)
    with pytest.raises(WorkerError, match="> 0 s"):
        Worker("whole", "mlp", 1, 8, limit=0.01)


def test_the_command_measures_every_program(tmp_path):
    output = tmp_path / "result.txt"
    options = "--networks mlp --batch 8 --micro-sizes 1 2 --rounds 1 --turn 0.05 --first-calls 0 --ways whole ours"
    command = [sys.executable, "-m", "benchmarks", *options.split(), "--output", str(output)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert output.read_text() == finished.stdout
    rows = [line for line in finished.stdout.splitlines() if line.endswith("yes")]
    assert [row[:50].split()[-1] for row in rows] == ["1", "1", "2"]
    assert "whole batch" in rows[0]
    assert all("gaccum_ms" in row for row in rows[1:])
    for row in rows:
        milliseconds, ratio, first_call = row[50:].split()[:3]
        assert float(milliseconds) > 0
        assert float(ratio) > 0
        assert float(first_call) > 0
    assert "not measured  time per update" in finished.stdout
    assert "mindspore 2." in finished.stdout


# -- collectives -------------------------------------------------------------------------------------------------------


def counted(ours: bool, steps: int, executed: float, in_graph: int, sent: int, micro_size: int = 1) -> dict[str, Any]:
    row = {"network": "mlp", "parameters": 6, "ours": ours, "micro_size": micro_size, "accumulation_steps": steps}
    return {**row, "executed": executed, "in_graph": in_graph, "bytes": sent}


GOOD = [counted(False, 1, 6, 6, 100), *(counted(True, steps, 1, 1, 100 + 12 * (steps > 1)) for steps in (1, 1, 4, 4))]


@pytest.mark.parametrize(
    "bad",
    [
        counted(True, 1, 4, 1, 100, 4),  # one for each micro-batch
        counted(True, 1, 4, 4, 100, 4),
        counted(True, 1, 1, 1, 400, 4),
        counted(True, 4, 1, 1, 124, 4),
    ],
)
def test_a_number_that_depends_on_micro_size_fails(bad):
    assert collectives.targets(GOOD)[0].startswith("PASS")
    assert collectives.targets([*GOOD, bad])[0].startswith("FAIL")


def test_more_collectives_than_mindspores_fail():
    assert collectives.targets([counted(False, 1, 6, 6, 100), counted(True, 1, 7, 7, 100)])[0].startswith("FAIL")


def test_ratios_of_reductions_pair_the_rounds():
    rows = [
        {"gradients": "some", "reducer": "first", "collectives": 6, "seconds": [0.001, 0.004, 0.001]},
        {"gradients": "some", "reducer": "second", "collectives": 1, "seconds": [0.002, 0.002, 0.0005]},
    ]
    first, second = (line.split()[-3:] for line in collectives.times_table(rows).splitlines()[-2:])
    assert first == ["6", "1.00", "1.00"]
    assert second == ["1", "2.00", "0.50"]


def test_the_command_counts_what_two_processes_send(tmp_path):
    """The MLP's weights and biases, and with accumulation_steps three sums, are float32."""
    output = tmp_path / "result.txt"
    options = "--networks mlp --micro-sizes 2 --accumulation-steps 1 2 --rounds 0"
    command = [sys.executable, "-m", "benchmarks.collectives", *options.split(), "--output", str(output)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert output.read_text() == finished.stdout
    size = 4 * (785 * 512 + 513 * 512 + 513 * 10)
    lines = [line.split() for line in finished.stdout.splitlines()]
    rows = [line[-5:] for line in lines if line and line[-1] in (f"{size}", f"{size + 12}")]
    assert rows == [
        ["1", "1", "6", "6", f"{size}"],
        ["2", "1", "1", "1", f"{size}"],
        ["2", "2", "1", "1", f"{size + 12}"],
    ]
    assert "PASS" in finished.stdout
