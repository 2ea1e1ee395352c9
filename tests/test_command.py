"""The command `gaccum-ms`, as `python -m gaccum_ms`: its help, its errors, and that it runs without MindSpore."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import gaccum_ms
from gaccum_ms.__main__ import main
from tests.support.paths import python_path

ENV = {**os.environ, "PYTHONPATH": python_path()}


@pytest.mark.parametrize("words", [[], ["run"], ["check"], ["report"]], ids=" ".join)
def test_help_fits_in_70_columns(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    try:
        assert main([*words, "--help"]) == 0
    except SystemExit as ended:
        assert ended.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: {' '.join(['gaccum-ms', *words])}")
    assert max(map(len, shown.splitlines())) <= 70, shown
    assert "\n\n" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chekc"], "there is no command chekc; the commands are run, check, report;"),
        (["run", "--proceses", "2", "x.py"], "there is no option --proceses; is --processes meant?"),
        (["report"], "the following arguments are required: record"),
        (["report", "no\nsuch.jsonl"], "cannot read 'no such.jsonl': No such file or directory"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, message, capsys):
    try:
        code = main(words)
    except SystemExit as ended:
        code = ended.code
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, "")
    assert shown.err.startswith(f"error: {message}")
    assert shown.err.endswith("see --help\n")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("words", ["--version", "report --help"])
def test_it_imports_no_mindspore(words, tmp_path):
    """Checked by Python's own record of imports."""
    command = [sys.executable, "-X", "importtime", "-m", "gaccum_ms", *words.split()]
    done = subprocess.run(command, env=ENV, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "gaccum_ms.launch.doctor" in done.stderr
    assert "mindspore" not in done.stderr
    if words == "--version":
        assert done.stdout == f"gaccum-ms {gaccum_ms.__version__}\n"


def test_a_reader_that_leaves_sees_no_traceback(tmp_path):
    record = tmp_path / "windows.jsonl"
    record.write_text('{"update": 1, "loss": 1.0}\n')
    program = f"'{sys.executable}' -m gaccum_ms"
    for words in ("--help", "run --help", f"report --output - '{record}'"):
        script = f"{program} {words} | true; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", script], env=ENV, capture_output=True, text=True, timeout=100)
        assert (done.returncode, done.stderr) == (0, ""), words
