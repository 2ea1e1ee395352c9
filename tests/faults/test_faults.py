"""Each planted fault is one that `mutations.py` can try, and nearly all are in the matrix."""

from __future__ import annotations

import pytest
from _pytest.mark import KeywordMatcher
from _pytest.mark.expression import Expression

from tests.matrix import read_table
from tests.mutations import FAULTS, PACKAGE
from tests.support.spread import TESTS, Spread, weekly_tests


def test_the_right_code_of_each_fault_is_in_its_file_once():
    numbers = {fault.what: (PACKAGE / fault.file).read_text().count(fault.right) for fault in FAULTS}
    assert {what: number for what, number in numbers.items() if number != 1} == {}


def test_each_fault_names_a_test_and_nearly_all_a_test_that_runs_at_each_commit(request):
    """The tests are those that pytest has collected, and the weekly ones; those of a package that is not installed are
    not known."""
    options = request.config.option
    if request.config.args != ["tests"] or options.keyword or options.markexpr != "not weekly":
        pytest.skip("only `bash run.sh test` collects all tests")
    spread = next(plugin for plugin in request.config.pluginmanager.get_plugins() if isinstance(plugin, Spread))
    unknown = []
    for fault in FAULTS:
        expression = Expression.compile(fault.words) if fault.words else None
        if set(fault.paths) <= set(spread.skipped_files):
            continue
        if not any(
            item.nodeid.startswith(fault.paths)
            and (expression is None or expression.evaluate(KeywordMatcher.from_item(item)))
            for item in request.session.items
        ):
            unknown.append(fault)
    weekly = weekly_tests(TESTS / "weekly.txt")
    assert all(any(name.startswith(fault.tests.split()[0]) for name in weekly) for fault in unknown), unknown
    assert len(unknown) <= 0.03 * len(FAULTS), unknown


def test_the_matrix_has_tests_that_find_nearly_all_faults():
    rows = read_table()
    without = [fault.what for fault in FAULTS if fault.what not in rows or not rows[fault.what].finders]
    assert len(without) <= 0.03 * len(FAULTS), without
    assert rows.keys() <= {fault.what for fault in FAULTS}
