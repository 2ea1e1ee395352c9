"""The matrix of faults and tests: for each planted fault, the three cheapest tests that find it, of those that run its
lines. ``python tests/matrix.py [--minutes 60] [words]`` makes what is missing of ``matrix.tsv`` , and can be stopped.

First all tests run once, and note which lines each runs (`support/lines_of_tests.py`). Then each fault is planted in a
copy of the project. The tests that the fault names run first, then those whose coverage has a line of the fault: the
others of these files, which share what they compile, and then from the files whose tests are cheapest, until three have
found it; at last a minute of random histories. The tests that a fault does not name have two minutes: 350 faults took
some three hours on two cores.

A row is made anew when the file of the fault, the fault, or a file of the tests that found it has changed; and where
fewer than three tests found it, not all were tried, and it had fewer seconds.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.mutations import FAULTS, JOBS, LIMIT, PACKAGE, PYTEST, ROOT, Fault, about, copies, planted, python_in, run

TABLE = ROOT / "tests" / "matrix.tsv"
MEASURED = ROOT / "build" / "lines_of_tests"
ENOUGH = 3  # tests that find a fault
FILES = 8  # that are collected at a time
HISTORIES = "histories.py --minutes 1"
# Coverage knows a process by the test that starts it, and is saved by processes that are ended or fork.
SETTINGS = """[run]
core = ctrace
source = {package}
data_file = {data}
parallel = true
patch = fork, _exit
sigterm = true
context = ${{PYTEST_CURRENT_TEST}}
disable_warnings = no-data-collected, module-not-measured, module-not-imported
"""


class Row(NamedTuple):
    """What was found of a fault: how many tests ran its lines, how many of them were tried in how many seconds beside
    those that it names, and which found it."""

    fault: str
    checksum: str
    covering: int
    tried: int
    seconds: int
    finders: list[str]

    def is_valid(self, fault: Fault, seconds: float) -> bool:
        is_whole = len(self.finders) >= ENOUGH or self.tried >= self.covering or self.seconds >= seconds
        return is_whole and self.checksum == checksum(fault, self.finders)


def checksum(fault: Fault, finders: list[str], root: Path = ROOT) -> str:
    """Of the fault, of its file, and of the files of the tests that found it."""
    files = {f"{PACKAGE.name}/{fault.file}", *("tests/" + re.split("::| ", finder)[0] for finder in finders)}
    texts = [(root / file).read_bytes() for file in sorted(files) if (root / file).exists()]
    return f"{zlib.crc32(b''.join([*texts, repr(fault).encode()])):08x}"


def read_table() -> dict[str, Row]:
    rows = {}
    for line in TABLE.read_text().splitlines()[1:] if TABLE.exists() else []:
        fault, number, covering, tried, seconds, *finders = line.split("\t")
        rows[fault] = Row(fault, number, int(covering), int(tried), int(seconds), finders)
    return rows


def write_table(rows: dict[str, Row]) -> None:
    lines = ["\t".join(("fault", "checksum", "tests of its lines", "tried", "in seconds", "found by"))]
    for fault in FAULTS:
        if fault.what in rows:
            *values, finders = rows[fault.what]
            lines.append("\t".join((*map(str, values), *finders)))
    new = TABLE.with_suffix(".new")
    new.write_text("\n".join(lines) + "\n")
    new.replace(TABLE)


def measure() -> None:
    """Run all tests, and keep their lines, their seconds, and the package of which these are."""
    shutil.rmtree(MEASURED, ignore_errors=True)
    shutil.copytree(PACKAGE, MEASURED / PACKAGE.name)
    settings = MEASURED / "settings"
    settings.write_text(SETTINGS.format(package=PACKAGE, data=MEASURED / "lines"))
    environment = {**os.environ, "COVERAGE_PROCESS_START": str(settings), "PYTHONPATH": str(ROOT)}
    suite = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.lines_of_tests", "-m", "not weekly"]
    suite += ["--numprocesses", "auto", "--dist", "loadgroup", "--no-loadscope-reorder"]
    subprocess.run(suite, cwd=ROOT, env=environment)  # a test that fails under coverage has its lines all the same
    histories = [sys.executable, *f"tests/{HISTORIES}".split()]
    subprocess.run(histories, cwd=ROOT, env={**environment, "PYTEST_CURRENT_TEST": HISTORIES})
    combine = [sys.executable, "-m", "coverage", "combine", "--quiet", f"--rcfile={settings}"]
    subprocess.run(combine, cwd=ROOT, check=True)
    (ROOT / "build" / "each_test.tsv").rename(MEASURED / "each_test.tsv")


class Candidates:
    """The tests that run the lines of a fault, in the order in which they are tried."""

    def __init__(self) -> None:
        from coverage import CoverageData  # not above: only this command needs it

        self.data = CoverageData(str(MEASURED / "lines"))
        self.data.read()
        lines = (MEASURED / "each_test.tsv").read_text().splitlines()[1:]
        self.seconds = {test: float(seconds) for seconds, test in (line.split("\t") for line in lines)}

    def of(self, fault: Fault) -> tuple[list[str], list[str], bool]:
        """The tests that the fault names; the others, in their order; and whether the histories are among them."""
        contexts: set[str] = set()
        lines = lines_of(fault)
        for line, tests in self.data.contexts_by_lineno(str(PACKAGE / fault.file)).items():
            if line in lines:
                contexts.update(re.sub("(@.*)? \\((setup|call|teardown)\\)$", "", test) for test in tests)
        tests = [test for test in self.seconds if test in contexts or test.partition("::")[0] in contexts]
        costs: dict[str, list[float]] = defaultdict(list)
        for test in tests:
            costs[test.partition("::")[0]].append(self.seconds[test])
        mean = {file: sum(seconds) / len(seconds) for file, seconds in costs.items()}
        named = [test for test in self.seconds if test.startswith(fault.paths) and has(test, fault.words)]
        order = {test: place for place, test in enumerate(self.seconds)}

        def key(test: str) -> tuple:
            file = test.partition("::")[0]
            return not test.startswith(fault.paths), mean[file], file, order[test]

        return named, sorted(set(tests) - set(named), key=key), HISTORIES in contexts


def has(test: str, words: str) -> bool:
    """Whether ``-k words`` chooses the test."""
    from _pytest.mark.expression import Expression

    return not words or Expression.compile(words).evaluate(lambda word, **_: word.lower() in test.lower())


def lines_of(fault: Fault) -> range:
    """The lines of the right code in the file that was measured; all, if it is not there."""
    before, _, after = (MEASURED / PACKAGE.name / fault.file).read_text().partition(fault.right)
    first = before.count("\n") + 1 if after else 1
    return range(first, before.count("\n") + fault.right.count("\n") + 2)


def few_files(tests: list[str]) -> Iterator[list[str]]:
    """The tests, those of a few files at a time: to collect those of all takes longer than to run some."""
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    for some in (files[:1], *(files[first : first + FILES] for first in range(1, len(files), FILES))):
        yield [test for test in tests if test.partition("::")[0] in some]


def results_of(tests: list[str], folder: Path, most: int, seconds: float) -> dict[str, str]:
    """The results of these tests in a copy, until so many have failed, or the time is over."""
    chosen = folder / "chosen"
    chosen.write_text("\n".join(tests))
    words = ("-v", f"--maxfail={most}", "-m", "not weekly", f"@{chosen}")
    _, said = python_in(folder, *PYTEST, *words, seconds=seconds)
    return dict(re.findall(r"^tests/(\S.*?) (PASSED|FAILED|ERROR)\b", said, re.MULTILINE))


def row_of(fault: Fault, folder: Path, candidates: Candidates, limit: float) -> Row:
    named, others, histories = candidates.of(fault)
    results: dict[str, str] = {}
    if not named:  # a weekly test, or one that is newer than what was measured
        results[fault.tests] = "FAILED" if run(fault, folder) == "found" else "PASSED"

    def finders() -> list[str]:
        return [test for test, result in results.items() if result != "PASSED"]

    with planted(fault, folder):
        if named:
            results |= results_of(named, folder, ENOUGH, LIMIT)
        until = time.monotonic() + limit
        for chosen in few_files(others):
            if len(finders()) < ENOUGH and time.monotonic() < until:
                results |= results_of(chosen, folder, ENOUGH - len(finders()), until - time.monotonic())
        if histories and len(finders()) < ENOUGH:
            code, _ = python_in(folder, *f"tests/{HISTORIES}".split(), seconds=LIMIT)
            results[HISTORIES] = "FAILED" if code == 1 else "PASSED"
    covering = len(named or [fault.tests]) + len(others) + histories
    number = checksum(fault, finders(), folder)
    return Row(fault.what, number, covering, len(results), int(limit), finders())


def make_rows(faults: list[Fault], rows: dict[str, Row], seconds: float, last: float) -> None:
    """Make the rows of these faults, and write the table after each. `last` : the time after which none is begun."""
    candidates, writing = Candidates(), threading.Lock()

    def make(fault: Fault) -> None:
        if (begin := time.monotonic()) > last:
            return
        with lent() as folder:
            row = row_of(fault, folder, candidates, seconds)
        with writing:
            rows[fault.what] = row
            write_table(rows)
        print(f"{row.fault}: found by {len(row.finders)} of {row.tried} ({time.monotonic() - begin:.0f} s)", flush=True)

    with copies() as lent, ThreadPoolExecutor(JOBS) as pool:
        list(pool.map(make, faults))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/matrix.py", description=__doc__)
    parser.add_argument("words", nargs="*", help="faults that have one of these in description or file; by default all")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no fault later")
    parser.add_argument(
        "--seconds", type=float, default=120, help="for the tests that a fault does not name (default: 120)"
    )
    parser.add_argument("--measure", action="store_true", help="run all tests again, for their lines")
    options = parser.parse_args()
    rows = read_table()
    missing = [
        fault
        for fault in about(options.words)
        if fault.what not in rows or not rows[fault.what].is_valid(fault, options.seconds)
    ]
    if missing:
        if options.measure or not MEASURED.exists():
            measure()
        make_rows(missing, rows, options.seconds, time.monotonic() + 60 * options.minutes)
    found = [row.finders for row in rows.values() if row.finders]
    print(
        f"{len(found)} of {len(FAULTS)} faults are found; {len({t for tests in found for t in tests})} tests find them"
    )


if __name__ == "__main__":
    main()
