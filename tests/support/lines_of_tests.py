"""A plugin of pytest: the lines of the package that each test executes, and those that MindSpore's compiler reads.

`tests/matrix.py` loads it, in processes that coverage.py measures from their start, and whose subprocesses it measures
too. Graph mode parses source that Python never executes: the lines of a function that it reads count for all tests of
the file, which may share what one of them compiles.
"""

from __future__ import annotations

import inspect
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

import gaccum_ms

PACKAGE = str(Path(gaccum_ms.__file__).parent) + os.sep
parsed: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))  # test file -> source file -> lines
running = ""


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    read = inspect.getsourcelines

    def noted(thing):
        lines, first = read(thing)
        code = getattr(inspect.unwrap(thing), "__code__", None)
        if code is not None and code.co_filename.startswith(PACKAGE):
            parsed[running.partition("::")[0]][code.co_filename].update(range(first, first + len(lines)))
        return lines, first

    inspect.getsourcelines = noted


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global running
    running = item.nodeid.partition("@")[0]
    coverage.Coverage.current().switch_context(running)
    return (yield)


def pytest_sessionfinish() -> None:
    measured = coverage.Coverage.current()
    if measured is None:
        return
    data = measured.get_data()
    for test_file, lines in parsed.items():
        data.set_context(test_file)
        data.add_lines(lines)
