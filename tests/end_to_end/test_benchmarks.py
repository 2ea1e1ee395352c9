"""The benchmarks' command with tiny settings, and the kernels of one micro-batch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.distributed
def test_the_command_measures_on_two_processes_and_writes_what_it_prints(tmp_path):
    output = tmp_path / "result.txt"
    options = "--networks mlp --batch 8 --micro-sizes 2 --processes 2 --rounds 1 --seconds 0 --turn 0.05"
    command = [sys.executable, "-m", "benchmarks", *options.split(), "--ways", "whole", "ours", "--output", str(output)]
    env = {**os.environ, "TEST_FOLDER": str(tmp_path)}  # tells its processes from those of another benchmark
    finished = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert finished.returncode == 0, finished.stderr
    text = finished.stdout
    assert output.read_text() == text
    rows = [line[34:].split()[:4] for line in text.splitlines() if line.endswith("yes")]
    assert [row[:2] for row in rows] == [["2", "1"], ["2", "2"]]
    assert all(float(number) > 0 for row in rows for number in row)
    for said in ("not measured  mlp: update at 16", "mindspore 2.", "threads: gaccum_ms.tune_cpu()"):
        assert said in text
    environments = [(process.pid, process.info["environ"] or {}) for process in psutil.process_iter(["environ"])]
    assert not [pid for pid, environment in environments if environment.get("TEST_FOLDER") == str(tmp_path)]


_KERNELS = """
import csv, sys
from pathlib import Path
from benchmarks.ways import WAYS, Setting
from mindspore.profiler import ProfilerActivity, profile, tensorboard_trace_handler

program = WAYS[sys.argv[1]].build(Setting("mlp", sys.argv[1], 1, 16))
program.step()
with profile(activities=[ProfilerActivity.CPU], on_trace_ready=tensorboard_trace_handler(sys.argv[1])):
    program.step()
(details,) = Path(sys.argv[1]).glob("**/cpu_op_detail_info_*.csv")
for row in csv.DictReader(details.open()):
    print("kernel", row["op_type"])
"""


def test_one_micro_batch_is_the_plain_step_and_three_kernels_of_one_number(tmp_path, programs):
    """Batches and updates are counted, and a share is divided out; nothing is accumulated."""
    script, kinds = tmp_path / "count_kernels.py", []
    script.write_text(_KERNELS)
    for way in ("ours", "whole"):  # each in a process of its own: the profiler leaves its mark
        finished = programs.run(script, way, folder=tmp_path)
        assert finished.returncode == 0, finished.stderr
        kinds.append(Counter(line.split()[1] for line in finished.stdout.splitlines() if line.startswith("kernel ")))
    ours, whole = kinds
    assert whole["MatMul"] >= 8
    assert ours - whole == Counter(AssignAdd=2, Div=1)
    assert not whole - ours
