"""Tests of the tests' own helpers: groups of tests, and second runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import paths

CONFTEST = """
from pathlib import Path
from tests.support import second_runs
from tests.support.spread import Spread

def pytest_configure(config):
    config.pluginmanager.register(Spread(Path(__file__).parent))
    config.pluginmanager.register(second_runs)
    config.addinivalue_line("markers", "weekly")
"""
FILE = """
import os, pytest

@pytest.fixture(scope="module")
def shared():
    with open("made", "a") as file:
        file.write("once ")
    return os.getpid()

@pytest.mark.parametrize("number", range(3))
def test_shared(number, shared): pass

def test_alone(): pass

@pytest.mark.xdist_group("apart")
def test_apart(): pass

@pytest.mark.parametrize("number", range(2))
def test_weekly(number): pass
"""


def run(folder: Path, *options: str, file: str = FILE) -> subprocess.CompletedProcess[str]:
    tests = folder / "tests"
    tests.mkdir(exist_ok=True)
    (tests / "conftest.py").write_text(CONFTEST)
    (tests / "test_it.py").write_text(file)
    (tests / "weekly.txt").write_text("test_it.py::test_weekly: a reason\n")
    (tests / "groups.tsv").write_text("seconds\tgroup\n1\ttest_it\n9\tapart\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--numprocesses", "2", "--dist", "loadgroup"]
    return subprocess.run(
        [*command, "--no-loadscope-reorder", "--rootdir", str(folder), "-rs", *options, "tests"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths.python_path()},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize(
    "tests, groups", [("not weekly", ["apart", "test_it", "test_it, fixtures"]), ("weekly", ["test_it"])]
)
def test_a_group_is_in_one_process_and_the_weekly_tests_run_apart(tests, groups, tmp_path):
    done = run(tmp_path, "-m", tests)
    assert done.returncode == 0, done.stdout + done.stderr
    names = [line.partition("::")[2] for line in (tmp_path / "build" / "each_test.tsv").read_text().splitlines()[1:]]
    if tests == "weekly":
        assert sorted(names) == ["test_weekly[0]", "test_weekly[1]"]
    else:
        assert sorted(names) == ["test_alone", "test_apart", *(f"test_shared[{number}]" for number in range(3))]
        assert (tmp_path / "made").read_text() == "once ", "one process makes a group's fixtures, once"
    rows = (tmp_path / "build" / "groups.tsv").read_text().splitlines()[1:]
    assert sorted(row.split("\t")[1] for row in rows) == groups


FAILS = """
import os, pytest

@pytest.mark.parametrize("name", ["a@b-[c]", "always"])
def test_fails_in_its_first_process(name):
    with open("processes", "a") as file:
        file.write(f"{name} {os.getpid()}\\n")
    first = len(set(open("processes"))) == 1
    assert name != "always" and not first, "MindSpore failed"

def test_fails_by_itself():
    assert False, "the test's own"
"""


def test_what_is_run_once_more_runs_in_a_process_of_its_own(tmp_path):
    done = run(tmp_path, "--reruns", "1", "--only-rerun", "MindSpore failed", file=FAILS)
    assert "2 failed, 1 passed, 2 rerun" in done.stdout, done.stdout + done.stderr
    lines = (tmp_path / "processes").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["a@b-[c]"] * 2 + ["always"] * 2
    assert len(set(lines)) == 4
