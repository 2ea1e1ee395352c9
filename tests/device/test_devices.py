"""Tests that need several devices, or a device's own clock. ``bash run.sh test device`` runs them on all devices, and
with ``DEVICE=CPU`` on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.test_docs import code_blocks, numbers_apart
from tests.launch.launched import LIMIT, PYTHONPATH, Launched
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


@pytest.mark.device(
    "semi-auto parallel mode on all devices, with each option, and pipelines: the weights of one process"
)
def test_semi_auto_ranks_with_each_option_train_as_one_process(tmp_path):
    script, kinds = Path(__file__).with_name("semi_auto_options.py"), ("windows", "two stages") * (DEVICE == "CPU")
    env = {"DEVICE": DEVICE, "PYTHONPATH": PYTHONPATH}
    command = [sys.executable, script, tmp_path / "one", *kinds]
    subprocess.run(command, env={**os.environ, **env}, timeout=LIMIT, check=True)
    done = Launched(script, "-n", str(RANKS), args=[str(tmp_path / "all"), *kinds], env=env, cwd=tmp_path).finish()
    assert done.returncode == 0, done.stderr
    one = dict(np.load(tmp_path / "one.0.npz"))
    trained = set()  # a rank has the weights of its pipeline stage, and four stages need four devices
    for rank in range(RANKS):
        weights = dict(np.load(tmp_path / f"all.{rank}.npz"))
        trained |= weights.keys()
        for name, weight in weights.items():
            np.testing.assert_allclose(weight, one[name], rtol=2e-3, atol=1e-5)
    assert trained == {name for name in one if RANKS % 4 == 0 or DEVICE == "CPU" or "four stages" not in name}


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
