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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

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


def read(file: Path) -> list[Fault]:
    """The faults of a file: for each, the description, the place, the right lines with a minus before them, the wrong
    ones with a plus, and the tests."""
    faults = []
    for block in file.read_text().strip().split("\n\n"):
        what, place, *change, tests = block.split("\n")
        right, wrong = ("\n".join(line[1:] for line in change if line[0] == sign) for sign in "-+")
        faults.append(Fault(what, place, right, wrong, tests))
    return faults


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
def copies() -> Iterator[queue.SimpleQueue[Path]]:
    """Copies of the project, as many as cores."""
    ignored = shutil.ignore_patterns(".git", ".venv*", "build", "__pycache__", "data")
    folders: queue.SimpleQueue[Path] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="gaccum_ms_mutations_") as name:
        for number in range(JOBS):
            folders.put(Path(shutil.copytree(ROOT, Path(name, str(number), "project"), ignore=ignored)))
        yield folders


def pytest_in(folder: Path, *words: str, seconds: float, **options: Any) -> int | None:
    """The exit code of pytest in a copy; None if it did not end in time. What its tests started ends with it."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    with subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **options) as tests:
        try:
            return tests.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(tests.pid, signal.SIGKILL)


def run(fault: Fault, folder: Path) -> str:
    """The result of the tests: "found", or why not."""
    number = (PACKAGE / fault.file).read_text().count(fault.right)
    if number != 1:
        return f"STALE: {fault.file} has its text {number} times"
    names, _, chosen = fault.tests.partition(" -k ")
    words = [f"tests/{name}" for name in names.split()] + (["-k", chosen.strip("'")] if chosen else [])
    with planted(fault, folder), (folder / "said").open("w+") as said:
        code = pytest_in(folder, "-q", "-x", *words, seconds=LIMIT, stdout=said, stderr=subprocess.STDOUT)
        said.seek(0)
        results = {0: "SURVIVES", 1: "found", None: f"NOT FINISHED in {LIMIT} s"}
        return results.get(code, f"NOT RUN: {said.read()[-600:]}")


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
    words = options.words
    chosen = [fault for fault in FAULTS if not words or any(word in fault.what or word in fault.file for word in words)]
    chosen = chosen if options.sample is None else sample(chosen, options.sample, options.seed)
    last = time.monotonic() + 60 * options.minutes

    def attempt(fault: Fault) -> bool | None:
        folder, begin = folders.get(), time.monotonic()
        if begin > last:
            folders.put(folder)
            print(f"{fault.what}: NOT TRIED, the time given by --minutes is over", flush=True)
            return None
        said = run(fault, folder)
        folders.put(folder)
        print(f"{fault.what}: {said} ({time.monotonic() - begin:.0f} s)", flush=True)
        return said == "found"

    with copies() as folders, ThreadPoolExecutor(JOBS) as pool:
        tried = [found for found in pool.map(attempt, chosen) if found is not None]
    print(f"{sum(tried)} of {len(tried)} found")
    return int(not all(tried))


if __name__ == "__main__":
    sys.exit(main())
