"""MindSpore's own tutorial program trains if its import line names gaccum_ms, and only then."""

from __future__ import annotations

import re

import pytest

import gaccum_ms
from tests.support import paths

SCRIPT = paths.worker("tutorial_script.py")
MINDSPORES = "from mindspore.nn.wrap.cell_wrapper import GradAccumulationCell\n"
OURS = "from gaccum_ms import GradAccumulationCell\n"
LOSS = re.compile(r"^epoch: \d+ step: \d+, loss is (\S+)$", re.MULTILINE)
LOOK = re.compile(r"^(before|after): weights (\w+) accuracy (\S+)$", re.MULTILINE)
pytestmark = pytest.mark.thorough


@pytest.fixture
def run(programs, digits, tmp_path):
    """Run the program with that import line; return the losses, and weights' digest and accuracy before and after."""

    def call(import_line: str) -> tuple[list[float], dict[str, tuple[str, float]]]:
        text = SCRIPT.read_text()
        assert text.count(MINDSPORES) == 1
        script = tmp_path / "train.py"
        script.write_text(text.replace(MINDSPORES, import_line))
        done = programs.run(script, folder=tmp_path, DATA_PATH=str(digits))
        assert done.returncode == 0, done.stderr[-3000:]
        looks = {when: (digest, float(accuracy)) for when, digest, accuracy in LOOK.findall(done.stdout)}
        return [float(loss) for loss in LOSS.findall(done.stdout)], looks

    return call


def test_with_our_import_it_trains(run):
    assert gaccum_ms.GradAccumulation is gaccum_ms.GradAccumulationCell, "a second name for the import line"
    losses, looks = run(OURS)
    (before, accuracy_before), (after, accuracy_after) = looks["before"], looks["after"]
    assert len(losses) == 20
    assert losses[0] < 2.5, "the mean over micro-batches, about ln 10 at first, not their sum"
    assert losses[-1] < losses[0] - 0.05
    assert after != before
    assert accuracy_after > accuracy_before + 0.2


def test_with_mindspores_import_no_weight_moves(run):
    losses, looks = run(MINDSPORES)
    assert losses, "it did run"
    assert looks["after"] == looks["before"]
