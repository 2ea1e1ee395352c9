"""MindSpore's own tutorial program trains once its import line names gaccum_ms, and only then."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import paths

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = paths.worker("tutorial_script.py")
MINDSPORES = "from mindspore.nn.wrap.cell_wrapper import GradAccumulationCell\n"
OURS = "from gaccum_ms import GradAccumulationCell\n"
LOSS = re.compile(r"^epoch: \d+ step: \d+, loss is (\S+)$", re.MULTILINE)
LOOK = re.compile(r"^(before|after): weights (\w+) accuracy (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """The digits in MNIST's files."""
    folder = tmp_path_factory.mktemp("digits") / "data"
    prepare = ROOT / "sample_code" / "distributed_gradient_accumulation" / "prepare_data.py"
    subprocess.run([sys.executable, str(prepare), str(folder)], check=True, timeout=600, stdout=subprocess.DEVNULL)
    return folder


def run(import_line: str, digits: Path, folder: Path) -> tuple[list[float], dict[str, tuple[str, float]]]:
    """Run the program with that import line; return the losses, and weights' digest and accuracy before and after."""
    text = SCRIPT.read_text()
    assert text.count(MINDSPORES) == 1
    script = folder / "train.py"
    script.write_text(text.replace(MINDSPORES, import_line))
    env = {**os.environ, "DATA_PATH": str(digits), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)], env=env, cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    looks = {when: (digest, float(accuracy)) for when, digest, accuracy in LOOK.findall(done.stdout)}
    return [float(loss) for loss in LOSS.findall(done.stdout)], looks


@pytest.mark.parametrize(
    "import_line",
    [
        OURS,
        pytest.param("from gaccum_ms import GradAccumulation as GradAccumulationCell\n", marks=pytest.mark.thorough),
    ],
    ids=["GradAccumulationCell", "GradAccumulation"],
)
def test_with_our_import_it_trains(digits, tmp_path, import_line):
    losses, looks = run(import_line, digits, tmp_path)
    (before, accuracy_before), (after, accuracy_after) = looks["before"], looks["after"]
    assert len(losses) == 20
    assert losses[0] < 2.5, "the mean over micro-batches, about ln 10 at first, not their sum"
    assert losses[-1] < losses[0] - 0.05
    assert after != before
    assert accuracy_after > accuracy_before + 0.2


@pytest.mark.thorough
def test_with_mindspores_import_no_weight_moves(digits, tmp_path):
    losses, looks = run(MINDSPORES, digits, tmp_path)
    assert losses, "it did run"
    assert looks["after"] == looks["before"]
