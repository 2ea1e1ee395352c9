"""Each sample of sample_code/ runs with few updates, and prints the kinds of lines that the docs show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.environment import of_users

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "sample_code"
DOCS = "".join(page.read_text() for page in sorted((ROOT / "docs").rglob("*.md")))
NAMES = {"image_classification", "language_model", "contrastive", "any_batch_size"}
LIMIT = 1500  # seconds; an idle machine needs a tenth

for module in ("matplotlib", "mindcv", "sklearn"):
    pytest.importorskip(module, reason=f"{module} is in the extras 'gallery' and 'test'", exc_type=ImportError)


def output_in_the_docs(name: str) -> str:
    return re.search(rf"```console\n\$ bash sample_code/{name}/run.sh\n(.*?)```", DOCS, re.DOTALL)[1]


def kinds_of_lines(text: str) -> list[str]:
    """The different lines without their numbers, which depend on the machine. The launcher's own line is left out, and
    so is advice, whose words depend on the numbers."""
    kinds = {re.sub(r"[\d.,]+|\s+", " ", line).strip() for line in text.splitlines() if not line.startswith("batch ")}
    return sorted(re.sub(r" +", " ", kind) for kind in kinds if "logs:" not in kind)


def is_a_picture(path: Path) -> bool:
    from matplotlib import pyplot

    pixels = pyplot.imread(path)
    return min(pixels.shape[:2]) > 100 and pixels.std() > 0.05


def numbers(pattern: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, text)]


def test_each_sample_has_its_place_in_the_docs():
    names = {folder.parent.name for folder in SAMPLES.glob("*/train.py")} - {"distributed_gradient_accumulation"}
    assert names == NAMES
    for name in names:
        assert output_in_the_docs(name)
        picture = SAMPLES / name / "result.png"
        assert f"../sample_code/{name}/{picture.name})" in DOCS
        assert is_a_picture(picture)
        assert picture.stat().st_size < 100_000


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("image_classification", "--epochs 2 --samples 128"),
        ("any_batch_size", "--epochs 2"),
        ("contrastive", "--epochs 1 --pairs 64 --batch-size 32"),
        pytest.param(
            "language_model",
            "-- --epochs 1 --batches 2 --print-every 2 --batch-size 16 --max-tokens 256",
            marks=pytest.mark.distributed,
        ),
    ],
)
def test_it_runs_by_its_run_sh(name, options, tmp_path):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", str(SAMPLES / name / "run.sh"), *options.split()]
    env = {**of_users(), "PATH": path}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)  # shown if an assertion fails
    assert is_a_picture(tmp_path / f"{name}.png")
    assert kinds_of_lines(done.stdout) == kinds_of_lines(output_in_the_docs(name))
    if name == "language_model":
        assert numbers(r"tokens; (\d+) ranks", done.stdout) == [2]
        padding, without_plan = numbers(r"(?:all .*|without a plan:) ([\d.]+)%", done.stdout)
        assert padding < 0.8 * without_plan
    if name == "any_batch_size":
        updates = numbers(r"after (\d+) updates", done.stdout)
        assert max(updates[1:]) < 0.6 * updates[0]
