"""Long-lived ranks, which run cases that tests request.

Starting ranks takes longer than most cases, and a test needs few of a worker's cases. So a session starts two ranks
once, at the first request. Both run the case and write their results; then they wait for the next request.

A worker is a module of ``tests/`` with ``CASES`` : a dict from names to functions, which take a folder and return
arrays by name. These names begin with the case's name: ``"adam"`` returns ``"adam/weights"`` . Several names may have
the same function.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.support import paths

TIME_LIMIT = 12 * 3600  # seconds that ranks live, as long as the tests that ask them
CASE_LIMIT = 600  # seconds for a case; the longest takes half a minute on a free core


class Ranks:
    """Ranks, started by the project's own launcher when they are first needed. A single rank is a process without
    launcher. As a context manager, it ends them.

    A rank that raises ends its launch, and the requesting test fails with the launcher's error; the next case starts
    the ranks again.
    """

    def __init__(self, folder: Path, number: int = 2, **environment: str) -> None:
        self.folder, self.number, self.environment = folder, number, environment
        self.launches = self.requests = 0
        self.launcher: subprocess.Popen | None = None

    def worker(self, module: str, out: Path) -> list[Asked]:
        """Each rank's results of a worker's cases, which may write files into `out` ."""
        answers = [Asked() for _ in range(self.number)]
        for one in answers:
            one.ask = Case(self, module, out, answers)
        return answers

    def run(self, module: str, case: str, out: Path) -> list[dict[str, np.ndarray]]:
        """Run one case on all ranks."""
        if self.launcher is None:
            self._start()
        request = self.place / f"{self.requests}.json"
        self.requests += 1
        self._write(request, json.dumps({"module": module, "case": case, "out": str(out)}))
        files = [request.with_suffix(f".{rank}.npz") for rank in range(self.number)]
        until = time.monotonic() + CASE_LIMIT
        while not all(file.exists() for file in files):
            if self.launcher.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"{module}, {case}: {self._end()}")
            time.sleep(0.02)
        return [dict(np.load(file)) for file in files]

    def _start(self) -> None:
        self.place = self.folder / f"launch{self.launches}"
        self.place.mkdir()
        self.launches += 1
        self.requests = 0
        command = [sys.executable]
        if self.number > 1:
            command += ["-m", "gaccum_ms.launch", "-n", str(self.number), "--log-dir", str(self.place / "log")]
            command += ["--timeout", str(TIME_LIMIT)]
        command += [str(paths.worker("rank_that_stays.py")), str(self.place), str(os.getpid())]
        with (self.place / "said").open("w") as said:
            self.launcher = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": paths.python_path(), **self.environment},
                cwd=self.place,
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    @staticmethod
    def _write(file: Path, text: str) -> None:
        """Write a file atomically."""
        new = file.with_suffix(".new")
        new.write_text(text)
        new.replace(file)

    def _end(self) -> str:
        """Kill the ranks, and return the launcher's output."""
        self.launcher.terminate()
        self.launcher.wait(timeout=120)
        self.launcher = None
        return (self.place / "said").read_text()[-6000:]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        if self.launcher is None:
            return
        self._write(self.place / f"{self.requests}.json", "null")
        code = self.launcher.wait(timeout=120)
        left = [
            one for one in psutil.process_iter(["pid", "cmdline"]) if str(self.place) in (one.info["cmdline"] or [])
        ]
        assert not left, left
        assert code == 0, (self.place / "said").read_text()[-6000:]


class Case:
    """Requests the case of a result's name from all ranks."""

    def __init__(self, ranks: Ranks, module: str, out: Path, answers: list[Asked]) -> None:
        self.ranks, self.module, self.out, self.answers = ranks, module, out, answers
        self.functions: Mapping[str, Any] = importlib.import_module(module).CASES
        self.failed: dict[Any, str] = {}  # these are not run again, because that would need new ranks

    def __call__(self, result: str) -> None:
        name = result.partition("/")[0]
        function = self.functions[name]
        if function in self.failed:
            raise AssertionError(self.failed[function])
        if function not in self.answers[0].asked:
            try:
                found = self.ranks.run(self.module, name, self.out)
            except AssertionError as error:
                self.failed[function] = str(error)
                raise
            for answer, results in zip(self.answers, found, strict=True):
                answer.asked.append(function)
                answer.update(results)


class Asked(dict[str, np.ndarray]):
    """One rank's results, by name; missing ones are requested."""

    ask: Case

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []

    def __missing__(self, name: str) -> np.ndarray:
        self.ask(name)
        if name not in self:
            raise KeyError(name)
        return self[name]
