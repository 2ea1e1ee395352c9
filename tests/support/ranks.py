"""Ranks that stay, and run what tests ask for.

Starting ranks takes longer than most of what they do, and a test needs few of a worker's cases. So a session starts two
ranks once, when a test first asks for a case. Both run it and write what they got; then they wait for the next.

A worker is a module of ``tests/`` with ``CASES`` : names, and functions that take a folder and return arrays by names
which begin with the case's own: ``"adam"`` returns ``"adam/weights"`` . One function may serve several names.
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

from support import paths

TIME_LIMIT = 3600  # seconds that ranks stay; the tests' own end comes first, unless it is a kill
CASE_LIMIT = 600  # seconds for a case; the longest takes one free core half a minute


class Ranks:
    """So many ranks, started by the project's own launcher when they are first needed; one is a process without a
    launcher. It is a context that ends them.

    A rank that raises ends its launch, and the test that asked fails with what the launcher says; the next case starts
    the ranks anew.
    """

    def __init__(self, folder: Path, number: int = 2, environment: Mapping[str, str | None] | None = None) -> None:
        self.folder, self.number = folder, number
        self.environment = dict(environment or {})  # None: without the variable
        self.launches = self.requests = 0
        self.launcher: subprocess.Popen | None = None

    def worker(self, module: str, out: Path) -> list[Asked]:
        """What each rank gets of a worker's cases, which may leave files in `out` ."""
        answers = [Asked() for _ in range(self.number)]
        for one in answers:
            one.ask = Case(self, module, out, answers)
        return answers

    def run(self, module: str, case: str, out: Path) -> list[dict[str, np.ndarray]]:
        """Have all ranks run one case."""
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
        variables = {**os.environ, "PYTHONPATH": paths.python_path(), **self.environment}
        command = [sys.executable]
        if self.number > 1:
            command += ["-m", "gaccum_ms.launch", "-n", str(self.number), "--log-dir", str(self.place / "log")]
            command += ["--timeout", str(TIME_LIMIT)]
        command += [str(paths.worker("rank_that_stays.py")), str(self.place), str(os.getpid())]
        with (self.place / "said").open("w") as said:
            self.launcher = subprocess.Popen(
                command,
                env={name: value for name, value in variables.items() if value is not None},
                cwd=self.place,
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    @staticmethod
    def _write(file: Path, text: str) -> None:
        """All of it, or nothing, is to be seen."""
        new = file.with_suffix(".new")
        new.write_text(text)
        new.replace(file)

    def _end(self) -> str:
        """End the ranks by force, and return what the launcher said."""
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
    """Asks all ranks for the case of a result's name."""

    def __init__(self, ranks: Ranks, module: str, out: Path, answers: list[Asked]) -> None:
        self.ranks, self.module, self.out, self.answers = ranks, module, out, answers
        self.functions: Mapping[str, Any] = importlib.import_module(module).CASES
        self.failed: dict[Any, str] = {}  # not tried again: it takes new ranks

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
    """What one rank got, by names; what is not there yet is asked for."""

    ask: Case

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []

    def __missing__(self, name: str) -> np.ndarray:
        self.ask(name)
        if name not in self:
            raise KeyError(name)
        return self[name]
