"""Selects the thorough tests, and distributes tests over processes: by groups, the longest first.

``@pytest.mark.thorough`` marks tests that only ``bash run.sh test all`` runs. For a test with parameters,
``@pytest.mark.core(mode="graph", size=[1, 4])`` selects the parameters that always run; ``core("graph-1", "graph-4")``
selects them by their ids. The others are thorough.

``tests/weekly.txt`` names the tests that only ``bash run.sh test weekly`` runs, with a reason for each. They get the
marks `weekly` and `thorough` .

``--minutes 30`` skips the tests that would begin after that time. The groups then take turns: each commit has an order
of its own, so that the tests that one commit had no time for run at others.

Tests that share a fixture of their module, which may start ranks or train, are one group, so that one process makes the
fixture once. All other tests of a file are another group. ``@pytest.mark.xdist_group(name)`` makes smaller or larger
groups.

A run writes two tables into ``build/``: ``each_test.tsv`` has the seconds of each test, and ``groups.tsv`` those of
each group. ``tests/groups.tsv`` is a copy of the second, and defines the order; a group that is missing there comes
first, because its time is unknown.
"""

from __future__ import annotations

import math
import random
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
THOROUGH = "thorough"  # the marker of tests that only `bash run.sh test all` runs
WEEKLY = "weekly"  # the marker of tests that only `bash run.sh test weekly` runs


def group_of(item: pytest.Item) -> str:
    """The group of a test."""
    mark = item.get_closest_marker("xdist_group")
    if mark is not None:
        return mark.args[0]
    file = item.nodeid.partition("::")[0].removeprefix("tests/").removesuffix(".py")
    return file + ", fixtures" * _shares_a_fixture(item)


def _shares_a_fixture(item: pytest.Item) -> bool:
    fixtures = item._fixtureinfo.name2fixturedefs.values() if isinstance(item, pytest.Function) else ()
    return any(
        one.scope in ("module", "session") and one.baseid.endswith(".py") and not one.argname.startswith("_")
        for definitions in fixtures
        for one in definitions
    )


def is_core(item: pytest.Item) -> bool:
    """Whether a test's parameters are selected by its mark `core` , or it has no such mark."""
    mark, call = item.get_closest_marker("core"), getattr(item, "callspec", None)
    if mark is None:
        return True
    if mark.args:
        return call.id in mark.args
    return all(_value(call, name) in _listed(chosen) for name, chosen in mark.kwargs.items())


def _value(call: Any, name: str) -> Any:
    """The value of a parameter, as marks name it."""
    return getattr(call.params[name], "__name__", None) or call.params[name]


def _listed(chosen: Any) -> list[Any]:
    return chosen if isinstance(chosen, list) else [chosen]


def missing_core(items: list[pytest.Item]) -> dict[str, set[str]]:
    """The ids, and values of parameters, in marks `core` that do not exist, by test."""
    missing = defaultdict(set)
    for item in items:
        if mark := item.get_closest_marker("core"):
            values = {f"{name}={value}" for name, chosen in mark.kwargs.items() for value in _listed(chosen)}
            missing[item.nodeid.partition("[")[0]].update(mark.args, values)
    for item in items:
        test, _, parameters = item.nodeid.partition("[")
        mark, call = item.get_closest_marker("core"), getattr(item, "callspec", None)
        missing[test].discard(parameters.removesuffix("]"))
        missing[test].difference_update(f"{name}={_value(call, name)}" for name in (mark.kwargs if mark else ()))
    return {test: values for test, values in missing.items() if values}


def weekly_tests(file: Path) -> dict[str, str]:
    """The tests that run once a week, and why."""
    return dict(line.split(": ", 1) for line in file.read_text().splitlines())


def known_seconds(file: Path, quick: bool) -> dict[str, float]:
    """The seconds of each group, for its quick tests or for all."""
    rows = (line.split("\t") for line in file.read_text().splitlines()[1:])
    return {group: float(of_quick if quick else whole) for whole, of_quick, group in rows}


def commit(folder: Path) -> str:
    """The hash of the folder's commit; nothing outside of a checkout."""
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def turns(groups: Iterable[str], commit_hash: str) -> dict[str, float]:
    """A number for each group, by which they are ordered at this commit."""
    return {group: random.Random(f"{commit_hash} {group}").random() for group in groups}


class Spread:
    """A plugin of pytest, which orders the tests, measures their times, and writes the tables."""

    def __init__(self, tests: Path = TESTS) -> None:
        self.known = tests / "groups.tsv"
        self.weekly = weekly_tests(tests / "weekly.txt")
        self.build = tests.parent / "build"
        self.seconds: dict[str, float] = defaultdict(float)
        self.groups: dict[str, str] = {}
        self.thorough: set[str] = set()
        self.missing: dict[str, set[str]] = {}
        self.until = math.inf

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.until = time.monotonic() + 60 * session.config.getoption("minutes")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if ids := self.missing.get(item.nodeid.partition("[")[0]):
            pytest.fail(f"the mark 'core' names what this test does not have: {', '.join(ids)}")
        if time.monotonic() > self.until:
            pytest.skip("the time given by --minutes is over")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if not any("::" in argument for argument in config.args):  # otherwise, not all of a test is here
            self.missing = missing_core(items)
        for item in items:
            is_weekly = item.nodeid.partition("[")[0].removeprefix("tests/") in self.weekly
            if is_weekly:
                item.add_marker(WEEKLY)
            if is_weekly or not is_core(item):
                item.add_marker(THOROUGH)
        if not config.getoption("loadgroup", False):
            return
        groups = {item: group_of(item) for item in items}
        if math.isfinite(config.getoption("minutes")):
            ranking = turns(groups.values(), commit(self.known.parent))
        else:
            ranking = known_seconds(self.known, quick=config.getoption("markexpr") == f"not {THOROUGH}")
        items.sort(key=lambda item: (-ranking.get(groups[item], math.inf), groups[item]))
        for item in items:
            item.user_properties.append(("group", groups[item]))
            if item.get_closest_marker("xdist_group") is None:
                item.add_marker(pytest.mark.xdist_group(groups[item]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.groups[report.nodeid] = dict(report.user_properties).get("group", "")
        self.seconds[report.nodeid] += report.duration
        if THOROUGH in report.keywords:
            self.thorough.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.config.getoption("dist", "no") != "loadgroup" or not self.seconds:
            return  # one of several processes, or a single one
        self.build.mkdir(exist_ok=True)
        groups: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        lines = []
        for test, seconds in sorted(self.seconds.items(), key=lambda pair: -pair[1]):
            group = self.groups[test]
            groups[group][0] += seconds
            groups[group][1] += seconds * (test not in self.thorough)
            lines.append(f"{seconds:.2f}\t{THOROUGH * (test in self.thorough)}\t{test.removesuffix('@' + group)}\n")
        (self.build / "each_test.tsv").write_text("seconds\ttier\ttest\n" + "".join(lines))
        rows = sorted(groups.items(), key=lambda pair: -pair[1][0])
        table = "".join(f"{whole:.0f}\t{quick:.0f}\t{group}\n" for group, (whole, quick) in rows)
        (self.build / "groups.tsv").write_text("all\tquick\tgroup\n" + table)
