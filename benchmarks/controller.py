"""Runs the workers of one network and collects what they measure.

All programs are built first, each alone on the machine; then they take turns, one after the other in every round, so
that a slow minute of the machine falls on all of them alike. An idle worker sleeps in a read and uses no processor.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.networks import NETWORKS
from benchmarks.report import FIRST_CALL_SIZES, Row
from benchmarks.ways import WAYS, Way

_ROOT = Path(__file__).resolve().parents[1]
_BASELINE_UPDATES_SECONDS = 0.1
Log = Callable[[str], None]


class WorkerError(Exception):
    """A worker that died or did not answer in time; the message fits in a table."""


class Worker:
    """A measured program in a process of its own. The constructor returns when its first call is done."""

    def __init__(self, way: str, network: str, micro_size: int, batch: int, limit: float) -> None:
        self._limit = limit
        # Its own folder: MindSpore leaves files where it runs.
        self._folder = tempfile.TemporaryDirectory(prefix="gaccum_ms_benchmark_")
        settings = {"GLOG_v": "3"}
        if way in WAYS and WAYS[way].framework == "mindspore":  # PyTorch reads some of the same variables
            settings |= NETWORKS[network].mindspore_environment
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        self._messages = Path(self._folder.name, "messages.txt")
        with self._messages.open("wb") as messages:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.worker", way, network, str(micro_size), str(batch)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                bufsize=0,  # select() knows nothing of what Python has read ahead
                cwd=self._folder.name,
                env={**settings, **os.environ, "PYTHONPATH": path},
            )
        try:
            self.first_call, self.trains = self._answer().values()
        except BaseException:
            self.close()
            raise

    def times(self, seconds: float) -> list[float]:
        return self._ask(f"time {seconds}")

    def peak(self) -> int:
        return self._ask("peak")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._folder.cleanup()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, command: str) -> Any:
        try:
            self._process.stdin.write(command.encode() + b"\n")
        except BrokenPipeError:
            raise WorkerError(f"failed: {self._last_words()}") from None
        return self._answer()

    def _answer(self) -> Any:
        deadline = time.monotonic() + self._limit
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise WorkerError(f"> {self._limit:.0f} s")
            received = self._process.stdout.read(65536)
            if not received:
                raise WorkerError(f"failed: {self._last_words()}")
            line += received
        return json.loads(line)

    def _last_words(self) -> str:
        self._process.wait()
        lines = [line.strip() for line in self._messages.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:100] if lines else f"exit status {self._process.returncode}"


def measure(
    network: str,
    ways: Iterable[str],
    micro_sizes: Iterable[int],
    *,
    batch: int,
    rounds: int,
    turn: float,
    limit: float,
    log: Log,
) -> list[Row]:
    """One row for each program of the network: `rounds` turns of `turn` seconds each, then its peak memory."""
    rows = [Row(network, way, micro_size) for way in ways for micro_size in (micro_sizes if WAYS[way].splits else [1])]
    with ExitStack() as stack:
        workers: dict[int, Worker] = {}
        for index, row in enumerate(rows):
            if not is_installed(WAYS[row.way]):
                row.note = "not installed"
                continue
            log(f"{network}: first call of {row.way}, micro_size {row.micro_size}")
            try:
                worker = stack.enter_context(Worker(row.way, network, row.micro_size, batch, limit))
            except WorkerError as error:
                row.note = str(error)
                continue
            workers[index] = worker
            row.first_call, row.trains = worker.first_call, worker.trains
        for number in range(rounds):
            log(f"{network}: round {number + 1} of {rounds}")
            for index, worker in list(workers.items()):
                try:
                    rows[index].turns.append(worker.times(turn))
                except WorkerError as error:
                    rows[index].note = str(error)
                    rows[index].turns.clear()  # turns are paired by round: half of them would pair wrongly
                    workers.pop(index).close()
        for index, worker in workers.items():
            rows[index].peak = worker.peak()
    for row in rows:
        if row.peak is not None:
            log(f"{network}: memory at micro-batches of one sample, {row.way}, micro_size {row.micro_size}")
            try:
                row.base_peak = _peak_of_one_sample(row, limit)
            except WorkerError as error:
                row.note = f"memory {error}"
    return rows


def _peak_of_one_sample(row: Row, limit: float) -> int:
    """Peak memory of the same program at micro-batches of one sample: the framework, compiling, and the weights."""
    with Worker(row.way, row.network, row.micro_size, row.micro_size, limit) as worker:
        worker.times(_BASELINE_UPDATES_SECONDS)
        return worker.peak()


def measure_first_calls(network: str, *, batch: int, repeats: int, limit: float, log: Log) -> dict[int, list[float]]:
    """Seconds of our first call in fresh processes, few and many micro-batches in turns."""
    seconds: dict[int, list[float]] = {size: [] for size in FIRST_CALL_SIZES}
    for number in range(repeats):
        # Now one is first, now the other: whoever comes second finds a warmer machine.
        for size in FIRST_CALL_SIZES if number % 2 == 0 else reversed(FIRST_CALL_SIZES):
            log(f"{network}: first call of ours in a fresh process, micro_size {size} ({number + 1} of {repeats})")
            try:
                with Worker("ours", network, size, batch, limit) as worker:
                    seconds[size].append(worker.first_call)
            except WorkerError as error:
                log(f"{network}: micro_size {size}: {error}")
    return seconds


def is_installed(way: Way) -> bool:
    return importlib.util.find_spec(way.framework) is not None
