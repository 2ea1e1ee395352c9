"""Tests of the tests' own helpers: the selection of tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import paths
from tests.support.spread import commit, turns

CONFTEST = """
from pathlib import Path
from tests.support import second_runs
from tests.support.spread import Spread

def pytest_addoption(parser):
    parser.addoption("--minutes", type=float, default=float("inf"))

def pytest_configure(config):
    config.pluginmanager.register(Spread(Path(__file__).parent))
    config.pluginmanager.register(second_runs)
    for mark in ("thorough", "core", "weekly"):
        config.addinivalue_line("markers", mark)
"""
FILE = """
import os, pytest

@pytest.fixture(scope="module")
def shared():
    with open("made", "a") as file:
        file.write("once ")
    return os.getpid()

@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("mode", ["graph", "pynative"])
@pytest.mark.core("graph-0", "pynative-2")
def test_by_ids(number, mode): pass

@pytest.mark.parametrize("kind", [int, str, list])
@pytest.mark.core(kind=["int", "str"])
def test_by_values(kind, shared): pass

@pytest.mark.thorough
def test_thorough(shared): pass

def test_quick(shared): pass

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
    (tests / "groups.tsv").write_text("all\tquick\tgroup\n1\t1\ttest_it\n9\t9\tapart\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--numprocesses", "2", "--dist", "loadgroup"]
    return subprocess.run(
        [*command, "--no-loadscope-reorder", "-rs", *options, "tests"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths.python_path()},
        capture_output=True,
        text=True,
        timeout=600,
    )


def tiers(folder: Path, *options: str) -> list[tuple[str, str]]:
    """The tests that ran, and the tier of each."""
    done = run(folder, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = (line.split("\t") for line in (folder / "build" / "each_test.tsv").read_text().splitlines()[1:])
    return sorted((name.partition("::")[2], tier) for _, tier, name in rows)


QUICK = ["test_apart", "test_by_ids[graph-0]", "test_by_ids[pynative-2]", "test_by_values[int]", "test_by_values[str]"]
QUICK += ["test_quick"]
THOROUGH = [f"test_by_ids[{one}]" for one in ("graph-1", "graph-2", "pynative-0", "pynative-1")]
THOROUGH += ["test_by_values[list]", "test_thorough", "test_weekly[0]", "test_weekly[1]"]


def test_tiers_share_the_tests_and_none_is_in_both(tmp_path):
    both = [(name, "") for name in QUICK] + [(name, "thorough") for name in THOROUGH]
    assert tiers(tmp_path) == sorted(both)
    assert (tmp_path / "made").read_text() == "once ", "a group's tests are in one process, which makes fixtures once"
    groups = [line.split("\t")[2] for line in (tmp_path / "build" / "groups.tsv").read_text().splitlines()[1:]]
    assert sorted(groups) == ["apart", "test_it", "test_it, fixtures"]
    assert [name for name, _ in tiers(tmp_path, "-m", "not thorough")] == sorted(QUICK)
    assert [name for name, _ in tiers(tmp_path, "-m", "weekly")] == ["test_weekly[0]", "test_weekly[1]"]


@pytest.mark.thorough
def test_after_the_given_minutes_tests_are_skipped_with_the_reason(tmp_path):
    done = run(tmp_path, "--minutes", "0")
    assert done.returncode == 0, done.stderr
    assert "SKIPPED [12]" in done.stdout
    assert "the time given by --minutes is over" in done.stdout
    assert not (tmp_path / "made").exists()


def test_each_commit_has_an_order_of_its_own(tmp_path):
    groups = [f"group {number}" for number in range(20)]
    orders = {tuple(sorted(groups, key=turns(groups, name).get)) for name in ("a", "b", "c", "a")}
    assert len(orders) == 3
    assert commit(tmp_path) == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@a"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    assert len(commit(tmp_path)) == 40


@pytest.mark.thorough
def test_what_a_core_mark_names_and_does_not_exist_fails_its_test(tmp_path):
    done = run(tmp_path, file=FILE.replace("graph-0", "graph-7").replace('["int", "str"]', '("int", "str")'))
    assert done.stdout.count("the mark 'core' names what this test does not have: graph-7") == 6
    assert done.stdout.count("the mark 'core' names what this test does not have: kind=('int', 'str')") == 3
    assert "3 passed, 9 errors" in done.stdout
