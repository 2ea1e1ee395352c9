"""Each sample of sample_code/ runs by its run.sh, and prints what docs/samples.md shows; one runs with few updates."""

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
PAGE = ROOT / "docs" / "samples.md"
NAMES = {"image_classification", "language_model", "contrastive", "any_batch_size"}
LIMIT = 1500  # seconds; an idle machine needs a tenth

for module in ("matplotlib", "mindcv", "sklearn"):
    pytest.importorskip(module, reason=f"{module} is in the extras 'gallery' and 'test'", exc_type=ImportError)


def shown(name: str) -> str:
    """The output of a sample that the page shows."""
    return re.search(rf"```console\n\$ bash sample_code/{name}/run.sh\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]


def lines(text: str) -> list[str]:
    """The different lines without their numbers, which depend on the machine. The launcher's own line is left out, and
    so is advice, whose words depend on the numbers."""
    kinds = {re.sub(r"[\d.,]+|\s+", " ", line).strip() for line in text.splitlines() if not line.startswith("batch ")}
    return sorted(re.sub(r" +", " ", kind) for kind in kinds if "logs:" not in kind)


def is_a_picture(path: Path) -> bool:
    from matplotlib import pyplot

    pixels = pyplot.imread(path)
    return min(pixels.shape[:2]) > 100 and pixels.std() > 0.05


def test_each_sample_is_tested_and_has_its_place_on_the_page():
    names = {folder.parent.name for folder in SAMPLES.glob("*/train.py")} - {"distributed_gradient_accumulation"}
    assert names == NAMES
    for name in names:
        assert shown(name)
        picture = SAMPLES / name / "result.png"
        assert f"(../sample_code/{name}/{picture.name})" in PAGE.read_text()
        assert is_a_picture(picture)
        assert picture.stat().st_size < 100_000


def test_few_updates(programs, tmp_path):
    """Of one sample; the thorough tests run all of them completely."""
    few = ("--epochs", "1", "--pairs", "64", "--batch-size", "32")
    done = programs.run(SAMPLES / "contrastive" / "train.py", *few, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "contrastive.png" in done.stdout
    assert is_a_picture(tmp_path / "contrastive.png")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A function that starts a sample by its run.sh in another folder, checks its output, and returns it. Fewer epochs
    than the page's suffice where they reach the same bounds. Batches of one size are compiled once, so that a short
    last batch is left out."""

    def run(name: str, *options: str) -> str:
        folder = tmp_path_factory.mktemp(name)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {**of_users(), "PATH": path}
        command = ["bash", str(SAMPLES / name / "run.sh"), *options]
        done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 0, done.stderr[-3000:]
        assert is_a_picture(folder / f"{name}.png")
        print(done.stdout)  # shown if an assertion fails
        assert lines(done.stdout) == lines(shown(name))
        return done.stdout

    return run


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, text)]


@pytest.mark.thorough
def test_image_classification(whole):
    text = whole("image_classification", "--epochs", "3", "--samples", "1408", "--accumulation-steps", "2")
    weights, averages = numbers(r"accuracy ([\d.]+)%", text), numbers(r"averages ([\d.]+)%", text)
    assert len(weights) == 3
    assert averages[-1] > 93
    assert sum(averages[1:]) > sum(weights[1:])


@pytest.mark.thorough
@pytest.mark.distributed
def test_language_model(whole):
    half = ("--batch-size", "64", "--max-tokens", "512", "--batches", "40")
    text = whole("language_model", "--", "--epochs", "2", *half)
    (ranks,) = numbers(r"tokens; (\d+) ranks", text)
    assert ranks == 2
    losses = numbers(r"loss ([\d.]+),", text)
    assert losses[-1] < 4.8 < losses[0] - 0.5
    with_plan, without = numbers(r"all .* ([\d.]+)%", text), numbers(r"without a plan: ([\d.]+)%", text)
    assert with_plan[0] < 0.7 * without[0]


@pytest.mark.thorough
def test_contrastive(whole):
    options = ("--epochs", "18", "--pairs", "1392", "--batch-size", "464")
    each, whole_batch = numbers(r": ([\d.]+)% of", whole("contrastive", *options))
    assert whole_batch > each + 2
    assert each > 40


@pytest.mark.thorough
def test_any_batch_size(whole):
    text = whole("any_batch_size", "--epochs", "6")
    small, adaptive, large, ada_scale = numbers(r": loss ([\d.]+) after", text)
    updates = numbers(r"after (\d+) updates", text)
    assert adaptive < 1.5 * small
    assert ada_scale < 1.5 * small
    assert large > 2 * small
    assert max(updates[1:]) < updates[0] / 3
