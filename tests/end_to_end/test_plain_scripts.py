"""Scripts that were written without accumulation train, evaluate, predict and export the same with one word more."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.environment import of_users
from tests.support.modes import MODES
from tests.support.paths import python_path

SCRIPTS = Path(__file__).with_name("plain_scripts")
IMPORT = ("import mindspore as ms\n", "import mindspore as ms\nfrom gaccum_ms import GradAccumulationCell\n")
LIMIT = 900  # seconds; an idle machine needs a twentieth
NUMBER = r"-?\d+\.\d+(?:e-?\d+)?"


@dataclass(frozen=True)
class Script:
    """A plain script, which gets the mode, the digits' folder and for several ranks the word "distributed"."""

    name: str
    network: str  # its name in the line that makes the Model
    metrics: int  # that it prints
    predictions: int  # as many as exported

    @property
    def text(self) -> str:
        return (SCRIPTS / f"{self.name}.py").read_text()

    def with_cell(self, options: str = "4") -> str:
        """With the import, and the cell in the line that makes the Model."""
        plain = f"Model({self.network}, "
        assert self.text.count(plain) == self.text.count(IMPORT[0]) == 1
        with_cell = plain.replace(self.network, f"GradAccumulationCell({self.network}, {options})")
        return self.text.replace(plain, with_cell).replace(*IMPORT)


LENET = Script("lenet", "network", metrics=1, predictions=10)
MINDCV = Script("mindcv_network", "network", metrics=2, predictions=10)
TEXT = Script("text_classifier", "net", metrics=6, predictions=2)


@pytest.fixture
def run(programs, request, tmp_path):
    """A function that runs a text as a script, and returns what each rank prints."""

    def outputs(text: str, mode: str, ranks: int = 1) -> list[str]:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        script = folder / "train.py"
        script.write_text(text)
        # scikit-learn takes long to import, and not all scripts read digits.
        digits = request.getfixturevalue("digits") if "MnistDataset" in text else ""
        arguments = str(int(MODES[mode])), str(digits)
        if ranks == 1:
            done = programs.run(script, *arguments, folder=folder)
            assert done.returncode == 0, done.stderr[-3000:]
            return [done.stdout]
        launch = [sys.executable, "-m", "gaccum_ms.launch", "--processes", str(ranks), "--log-dir", str(folder / "log")]
        environment = {**of_users(), "PYTHONPATH": python_path()}
        command = [*launch, str(script), *arguments, "distributed"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return [(folder / "log" / "1" / f"rank.{rank}" / "stdout").read_text() for rank in range(ranks)]

    return outputs


def printed(output: str) -> tuple[list[str], dict[str, list[float]]]:
    """The lines without their numbers; the losses and metrics, and what was predicted and exported."""
    lines = re.findall(r"^(?:epoch:|Eval|accuracy|predicted|exported).*$", output, re.MULTILINE)
    numbers: dict[str, list[float]] = {}
    for line in lines:
        numbers.setdefault(line.split()[0], []).extend(map(float, re.findall(NUMBER, line)))
    return [re.sub(NUMBER, "#", line) for line in lines], numbers


def assert_prints_the_same(script: Script, plain: list[str], changed: list[str]) -> None:
    for output, changed_output in zip(plain, changed, strict=True):
        lines, numbers = printed(output)
        changed_lines, changed_numbers = printed(changed_output)
        assert changed_lines == lines
        assert len(numbers["epoch:"]) >= 2
        assert len(numbers.get("Eval", []) + numbers.get("accuracy", [])) == script.metrics
        assert len(numbers["predicted"]) == len(numbers["exported"]) == script.predictions
        for kind, values in numbers.items():
            # A prediction near zero is a difference of larger numbers.
            assert changed_numbers[kind] == pytest.approx(values, rel=1e-4, abs=1e-4 if kind[0] in "pe" else 0), kind


# All ranks and modes with one script, pairs of them with the others.
WITH = [(LENET, ranks, mode) for ranks in (1, 2) for mode in MODES]
WITH += [(script, *pair) for script in (MINDCV, TEXT) for pair in ((1, "graph"), (2, "pynative"))]


@pytest.mark.thorough  # test_docs.py has a quick one
@pytest.mark.parametrize(
    ("script", "ranks", "mode"),
    [
        pytest.param(*case, id=f"{case[0].name}-{case[1]}-{case[2]}", marks=[pytest.mark.distributed] * (case[1] > 1))
        for case in WITH
    ],
)
def test_one_word_changes_a_script_that_was_written_without_accumulation(script, ranks, mode, run):
    if script is MINDCV:
        pytest.importorskip("mindcv", reason="mindcv is in the extra 'test'", exc_type=ImportError)
    plain = run(script.text, mode, ranks)
    assert_prints_the_same(script, plain, run(script.with_cell(), mode, ranks))


@pytest.mark.thorough
def test_a_wrong_update_prints_other_numbers(run):
    """So that the test above finds one: here each update is clipped."""
    plain = run(TEXT.text, "graph")
    wrong = run(TEXT.with_cell("4, max_grad_norm=0.01"), "graph")
    with pytest.raises(AssertionError, match=r"Mismatched elements|comparison failed"):
        assert_prints_the_same(TEXT, plain, wrong)
