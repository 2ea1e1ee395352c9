"""Which tests are thorough, and how processes share the tests: by groups, the longest first.

``@pytest.mark.thorough`` is on what only ``bash run.sh test all`` runs. Of a test with parameters,
``@pytest.mark.core(mode="graph", size=[1, 4])`` names those that run always; ``core("graph-1", "graph-4")`` names them
by their ids. The others are thorough.

Tests that share a fixture of their module, which may start ranks or train, are one group, so that one process makes it
once. All other tests of a file are another. ``@pytest.mark.xdist_group(name)`` makes groups that are smaller or larger.

A run leaves two tables in ``build/``: ``each_test.tsv`` has the seconds of each test, and ``groups.tsv`` those of each
group. A copy of the second is ``tests/groups.tsv``, which says what is longest; a group that it does not have comes
first, because nobody can say how long it takes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
BUILD = TESTS.parent / "build"
THOROUGH = "thorough"  # the marker of tests that only `bash run.sh test all` runs


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
    """Whether a test's parameters are those that its mark `core` names, if it has one."""
    mark, call = item.get_closest_marker("core"), getattr(item, "callspec", None)
    if mark is None:
        return True
    if mark.args:
        return call.id in mark.args
    return all(
        (getattr(call.params[name], "__name__", None) or call.params[name]) in (one if isinstance(one, list) else [one])
        for name, one in mark.kwargs.items()
    )


def known_seconds(file: Path = TESTS / "groups.tsv") -> dict[str, float]:
    """How long each group takes when all its tests run."""
    rows = (line.split("\t") for line in file.read_text().splitlines()[1:])
    return {group: float(whole) for whole, _, group in rows}


class Spread:
    """A plugin of pytest: it orders the tests, notes how long each takes, and writes the tables."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.thorough: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        for item in items:
            if not is_core(item):
                item.add_marker(THOROUGH)
        if not config.getoption("loadgroup", False):
            return
        known = known_seconds()
        groups = {item: group_of(item) for item in items}
        items.sort(key=lambda item: (-known.get(groups[item], math.inf), groups[item]))
        for item in items:
            if item.get_closest_marker("xdist_group") is None:
                item.add_marker(pytest.mark.xdist_group(groups[item]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if THOROUGH in report.keywords:
            self.thorough.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.config.getoption("dist", "no") != "loadgroup" or not self.seconds:
            return  # one of several processes, or one that had no need to share
        BUILD.mkdir(exist_ok=True)
        groups: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        lines = []
        for test, seconds in sorted(self.seconds.items(), key=lambda pair: -pair[1]):
            name, _, group = test.rpartition("@")
            groups[group][0] += seconds
            groups[group][1] += seconds * (test not in self.thorough)
            lines.append(f"{seconds:.2f}\t{THOROUGH * (test in self.thorough)}\t{name}\n")
        (BUILD / "each_test.tsv").write_text("seconds\ttier\ttest\n" + "".join(lines))
        rows = sorted(groups.items(), key=lambda pair: -pair[1][0])
        table = "".join(f"{whole:.0f}\t{quick:.0f}\t{group}\n" for group, (whole, quick) in rows)
        (BUILD / "groups.tsv").write_text("all\tquick\tgroup\n" + table)
