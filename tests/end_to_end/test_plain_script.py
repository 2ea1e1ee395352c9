"""A script that was written without accumulation trains, evaluates, predicts and exports the same on two ranks with one
word more. test_docs.py has one for one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import python_path

SCRIPT = Path(__file__).with_name("plain_script.py")
NUMBER = r"-?\d+\.\d+(?:e-?\d+)?"


def changed(text: str) -> str:
    """With the import, and the cell in the line that makes the Model."""
    for old, new in (
        ("import mindspore as ms\n", "import mindspore as ms\nfrom gaccum_ms import GradAccumulationCell\n"),
        ("Model(net, ", "Model(GradAccumulationCell(net, 4), "),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


def run(folder: Path, text: str) -> list[str]:
    """Run a text as a script, and return what each rank prints."""
    folder.mkdir()
    (folder / "train.py").write_text(text)
    command = [sys.executable, "-m", "gaccum_ms.launch", "--processes", "2", "--log-dir", "log", "train.py"]
    env = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [(folder / "log" / "1" / f"rank.{rank}" / "stdout").read_text() for rank in range(2)]


def printed(output: str) -> tuple[list[str], dict[str, list[float]]]:
    """The lines without their numbers; the losses and metrics, and what was predicted and exported."""
    lines = re.findall(r"^(?:epoch:|Eval|predicted|exported).*$", output, re.MULTILINE)
    numbers: dict[str, list[float]] = {}
    for line in lines:
        numbers.setdefault(line.split()[0], []).extend(map(float, re.findall(NUMBER, line)))
    return [re.sub(NUMBER, "#", line) for line in lines], numbers


@pytest.mark.distributed
def test_one_word_changes_a_script_that_was_written_without_accumulation(tmp_path):
    plain = SCRIPT.read_text()
    outputs = run(tmp_path / "plain", plain), run(tmp_path / "changed", changed(plain))
    for output, changed_output in zip(*outputs, strict=True):
        (lines, numbers), (changed_lines, changed_numbers) = printed(output), printed(changed_output)
        assert changed_lines == lines
        assert len(numbers["epoch:"]) >= len(numbers["Eval"]) == 6
        assert len(numbers["predicted"]) == len(numbers["exported"]) == 2
        for kind, values in numbers.items():
            # A prediction near zero is a difference of larger numbers.
            assert changed_numbers[kind] == pytest.approx(values, rel=1e-4, abs=1e-4 if kind[0] in "pe" else 0), kind
