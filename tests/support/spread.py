"""Distributes tests over processes: by groups, the longest first.

Tests that share a fixture of their module, which may start ranks or train, are one group, so that one process makes the
fixture once. All other tests of a file are another group. ``@pytest.mark.xdist_group(name)`` makes smaller or larger
groups.

``tests/weekly.txt`` names the tests that only ``bash run.sh test weekly`` runs, with a reason for each; a name without
parameters is that of all of them. They get the mark `weekly` .

A run writes two tables into ``build/``: ``each_test.tsv`` has the seconds of each test, and ``groups.tsv`` those of
each group. ``tests/groups.tsv`` is a copy of the second, and defines the order; a group that is missing there comes
first, because its time is unknown.
"""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


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
        fixture.scope in ("module", "session") and fixture.baseid.endswith(".py") and fixture.argname[0] != "_"
        for definitions in fixtures
        for fixture in definitions
    )


def weekly_tests(file: Path) -> dict[str, str]:
    """The tests that run once a week, and why."""
    return dict(line.split(": ", 1) for line in file.read_text().splitlines())


def known_seconds(file: Path) -> dict[str, float]:
    """The seconds of each group."""
    rows = (line.split("\t") for line in file.read_text().splitlines()[1:])
    return {group: float(seconds) for seconds, group in rows}


class Spread:
    """A plugin of pytest, which orders the tests, measures their times, and writes the tables."""

    def __init__(self, tests: Path = TESTS) -> None:
        self.known = tests / "groups.tsv"
        self.weekly = weekly_tests(tests / "weekly.txt")
        self.build = tests.parent / "build"
        self.seconds: dict[str, float] = defaultdict(float)
        self.groups: dict[str, str] = {}
        self.skipped_files: list[str] = []  # those that skip themselves, as for want of a package

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.skipped_files.append(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        for item in items:
            name = item.nodeid.removeprefix("tests/")
            if name in self.weekly or name.partition("[")[0] in self.weekly:
                item.add_marker("weekly")
        if not config.getoption("loadgroup", False):
            return
        groups = {item: group_of(item) for item in items}
        known = known_seconds(self.known)
        items.sort(key=lambda item: (-known.get(groups[item], math.inf), groups[item]))
        for item in items:
            item.user_properties.append(("group", groups[item]))
            if item.get_closest_marker("xdist_group") is None:
                item.add_marker(pytest.mark.xdist_group(groups[item]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.groups[report.nodeid] = dict(report.user_properties).get("group", "")
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.config.getoption("dist", "no") != "loadgroup" or not self.seconds:
            return  # one of several processes, or a single one
        self.build.mkdir(exist_ok=True)
        groups: dict[str, float] = defaultdict(float)
        lines = []
        for test, seconds in sorted(self.seconds.items(), key=lambda pair: -pair[1]):
            group = self.groups[test]
            groups[group] += seconds
            lines.append(f"{seconds:.2f}\t{test.removesuffix('@' + group)}\n")
        (self.build / "each_test.tsv").write_text("seconds\ttest\n" + "".join(lines))
        rows = sorted(groups.items(), key=lambda pair: -pair[1])
        table = "".join(f"{seconds:.0f}\t{group}\n" for group, seconds in rows)
        (self.build / "groups.tsv").write_text("seconds\tgroup\n" + table)
