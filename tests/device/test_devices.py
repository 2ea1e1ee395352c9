"""Tests that need several devices, or a device's own clock. ``bash run.sh test device`` runs them on all devices, and
with ``DEVICE=CPU`` on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.test_docs import code_blocks, numbers_apart
from tests.launch.launched import Launched
from tests.support.device import DEVICE, RANKS

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif("GACCUM_MS_DEVICE" not in os.environ, reason="on CPU the rehearsal runs them: test_report.py"),
]


def run_page(name: str, folder: Path) -> tuple[str, str]:
    """The output of a page's first program on rank 0, and the output that the page shows."""
    page = ROOT / "docs" / name
    script = folder / "program.py"
    script.write_text(code_blocks(page, "python")[0])
    done = Launched(script, "-n", str(RANKS), env={"DEVICE": DEVICE}).finish()
    assert done.returncode == 0, done.stderr
    printed = (folder / "log_output" / "1" / "rank.0" / "stdout").read_text()
    return printed, code_blocks(page, "text")[0]


@pytest.mark.device("data parallel mode on all devices, with NCCL or HCCL: the weights of one process")
def test_data_parallel_ranks_train_as_one_process(tmp_path):
    printed, shown = run_page("howto/devices.md", tmp_path)
    (text, numbers), (shown_text, shown_numbers) = numbers_apart(printed), numbers_apart(shown)
    assert text == shown_text
    assert numbers == pytest.approx(shown_numbers, rel=2e-3)
    for rank in range(RANKS):
        assert {file.name for file in (tmp_path / "checkpoints" / str(rank)).iterdir()} >= {"net-5_4.ckpt"}


@pytest.mark.device("semi-auto parallel mode on all devices: the weights of one process (on CPU: data parallel mode)")
def test_semi_auto_ranks_train_as_one_process(tmp_path):
    printed, shown = run_page("parallel.md", tmp_path)
    weights = numbers_apart(shown[shown.index("[[") :])[1]
    assert numbers_apart(printed[printed.index("[[") :])[1] == pytest.approx(weights, rel=2e-3)
    assert ("no semi-auto parallel mode" in printed) == (DEVICE == "CPU")


@pytest.mark.device("the benchmarks: an update's time, beside the whole batch's")
def test_benchmarks_measure(tmp_path, record_property):
    words = ["--limit", "500", "--networks", "mlp"]
    if DEVICE == "CPU":
        words += ["--ways", "ours", "--batch", "4", "--micro-sizes", "4", "--processes", "1"]
        words += ["--rounds", "1", "--seconds", "0"]
    else:
        words += ["cnn", "--ways", "whole", "ours", "--micro-sizes", "1", "4", "16"]
        words += ["--processes", *sorted({"1", str(RANKS)})]
    command = [sys.executable, "-m", "benchmarks", *words, "--output", str(tmp_path / "table.txt")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr
    record_property("table", done.stdout)
    assert "mlp" in done.stdout
