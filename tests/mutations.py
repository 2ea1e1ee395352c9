"""Deliberate faults in copies of the project, one in each, and the tests that must find it:
``python tests/mutations.py [--sample 10] [words]``. There are as many copies at a time as cores.

Each fault replaces one piece of text, and only the named tests run. A fault that they do not find is a survivor: a test
is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "gaccum_ms"
LIMIT = 1200  # seconds for the tests of one fault
JOBS = len(os.sched_getaffinity(0))


class Fault(NamedTuple):
    """A description, the place, and the tests that find it: arguments of pytest, without ``tests/`` ."""

    what: str
    file: str
    right: str
    wrong: str
    tests: str

    @property
    def paths(self) -> tuple[str, ...]:
        """The files, or single tests, that it names."""
        return tuple(f"tests/{name}" for name in self.tests.partition(" -k ")[0].split())

    @property
    def words(self) -> str:
        """The expression after ``-k`` ; empty if there is none."""
        return self.tests.partition(" -k ")[2].strip("'")


def read(file: Path) -> list[Fault]:
    """The faults of a file: for each, the description, the place, the right lines with a minus before them, the wrong
    ones with a plus, and the tests."""
    faults = []
    for block in file.read_text().strip().split("\n\n"):
        what, place, *change, tests = block.split("\n")
        right, wrong = ("\n".join(line[1:] for line in change if line[0] == sign) for sign in "-+")
        faults.append(Fault(what, place, right, wrong, tests))
    return faults


def about(words: list[str]) -> list[Fault]:
    """The faults that have one of the words in description or file; without words, all."""
    return [fault for fault in FAULTS if not words or any(word in fault.what or word in fault.file for word in words)]


FAULTS = [fault for file in sorted((ROOT / "tests" / "faults").glob("*.txt")) for fault in read(file)]


@contextlib.contextmanager
def planted(fault: Fault, folder: Path) -> Iterator[None]:
    """Within it, the copy in the folder has the fault."""
    file = folder / PACKAGE.name / fault.file
    text = file.read_text()
    file.write_text(text.replace(fault.right, fault.wrong))
    try:
        yield
    finally:
        file.write_text(text)


@contextlib.contextmanager
def copies() -> Iterator[Callable[[], contextlib.AbstractContextManager[Path]]]:
    """As many copies of the project as cores; it yields a function that lends one."""
    ignored = shutil.ignore_patterns(".git", ".venv*", "build", "__pycache__", "data")
    folders: queue.SimpleQueue[Path] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="gaccum_ms_mutations_") as name:
        for number in range(JOBS):
            folders.put(Path(shutil.copytree(ROOT, Path(name, str(number), "project"), ignore=ignored)))

        @contextlib.contextmanager
        def lent() -> Iterator[Path]:
            folder = folders.get()
            try:
                yield folder
            finally:
                folders.put(folder)

        yield lent


PYTEST = ("-m", "pytest", "-p", "no:cacheprovider")


def python_in(folder: Path, *words: str, seconds: float) -> tuple[int | None, str]:
    """Run Python in a copy. Returns its exit code, None if it did not end in time, and what it printed. Its process
    group ends with it."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    with (folder / "said").open("w+") as said:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env=environment,
            start_new_session=True,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        with process:
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        said.seek(0)
        return code, said.read()


def run(fault: Fault, folder: Path) -> str:
    """The result of the tests: "found", or why not."""
    number = (PACKAGE / fault.file).read_text().count(fault.right)
    if number != 1:
        return f"STALE: {fault.file} has its text {number} times"
    words = ("-k", fault.words) if fault.words else ()
    with planted(fault, folder):
        code, said = python_in(folder, *PYTEST, "-q", "-x", *fault.paths, *words, seconds=LIMIT)
    results = {0: "SURVIVES", 1: "found", None: f"NOT FINISHED in {LIMIT} s"}
    return results.get(code, f"NOT RUN: {said[-600:]}")


def sample(faults: list[Fault], number: int, seed: int) -> list[Fault]:
    """So many of the faults, of as many files as there are, in their order."""
    mixed = random.Random(seed).sample(faults, len(faults))
    first = {fault.file: fault for fault in reversed(mixed)}  # the first of each file
    mixed.sort(key=lambda fault: fault is not first[fault.file])
    return sorted(mixed[:number], key=faults.index)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/mutations.py", description=__doc__)
    parser.add_argument("words", nargs="*", help="those that have one of these in description or file; by default all")
    parser.add_argument("--sample", type=int, metavar="N", help="of these, run only N, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="try no fault that would begin later")
    options = parser.parse_args()
    chosen = about(options.words)
    chosen = chosen if options.sample is None else sample(chosen, options.sample, options.seed)
    last = time.monotonic() + 60 * options.minutes

    def attempt(fault: Fault) -> bool | None:
        with lent() as folder:
            if (begin := time.monotonic()) > last:
                print(f"{fault.what}: NOT TRIED, the time given by --minutes is over", flush=True)
                return None
            said = run(fault, folder)
        print(f"{fault.what}: {said} ({time.monotonic() - begin:.0f} s)", flush=True)
        return said == "found"

    with copies() as lent, ThreadPoolExecutor(JOBS) as pool:
        tried = [found for found in pool.map(attempt, chosen) if found is not None]
    print(f"{sum(tried)} of {len(tried)} found")
    return int(not all(tried))


if __name__ == "__main__":
    sys.exit(main())
