"""Runs the workers of one network and collects their measurements.

Programs are measured in groups, because not all fit into memory at once: a group has the whole batch, and the other
ways at one micro_size. All programs of a group are built first, each alone on the machine. Then they take turns, one
after another in every round, so that a slow minute of the machine affects all of them. Each round begins with another
program, and the first round is not counted, because caches and threads are cold. An idle worker sleeps in a read and
uses no processor.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import select
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.rows import WHOLE, Row
from benchmarks.ways import WAYS, Setting, Way

_ROOT = Path(__file__).resolve().parents[1]
_WORKER = Path(__file__).with_name("worker.py")
MOST_ROUNDS = 15
_BASELINE_UPDATES = 3
_POLL_SECONDS = 0.1
_RANKS_LIMIT_SECONDS = 3600  # for the launcher, if this program is killed while ranks wait for each other
_GRACE_SECONDS = 30
Log = Callable[[str], None]


class WorkerError(Exception):
    """A worker that died or did not answer in time; the message fits in a table."""


def environment(setting: Setting) -> dict[str, str]:
    """The environment of our programs: the user's, and a few more variables."""
    own = {"GLOG_v": "3"}
    if setting.processes > 1 and setting.is_of("torch"):
        # torchrun would set 1; our launcher gives each rank its share.
        own["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // setting.processes))
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    return {**own, **os.environ, "PYTHONPATH": path}


class Worker:
    """A measured program in separate processes, one for each rank. The constructor returns after its first call."""

    def __init__(self, setting: Setting, limit: float) -> None:
        self.setting = setting
        self._limit = limit
        # A separate folder, because MindSpore writes files into the working folder.
        self._folder = tempfile.TemporaryDirectory(prefix="gaccum_ms_benchmark_")
        self._messages = Path(self._folder.name, "messages.txt")
        self._ranks: list[Connection] = []
        address = f"gaccum_ms_benchmark-{uuid.uuid4().hex}"
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(f"\0{address}")
                listener.listen(setting.processes)
                self._process = self._start(address)
                deadline = time.monotonic() + limit
                while len(self._ranks) < setting.processes:
                    self._ranks.append(self._accept(listener, deadline))
            # The time of the slowest rank, and the memory of the largest.
            answers = self._answers()
            self.first_call = max(answer["first_call"] for answer in answers)
            self.trains = all(answer["trains"] for answer in answers)
            self.about = {key: answers[0][key] for key in ("weight_bytes", "threads")}
            self._seconds = self.updates(1)[0]
        except BaseException:
            self.close()
            raise

    def turn(self, seconds: float) -> list[float]:
        """The seconds of each update, for as many updates as take about `seconds` , at least one."""
        times = self.updates(max(1, round(seconds / self._seconds)))
        self._seconds = sum(times) / len(times)
        return times

    def updates(self, number: int) -> list[float]:
        """The seconds of each update, on its slowest rank."""
        return [max(times) for times in zip(*self._ask("updates", number), strict=True)]

    def loss(self) -> float:
        """The loss of one more update, over all ranks."""
        return sum(self._ask("loss")) / self.setting.processes

    def peak(self) -> int:
        return max(self._ask("peak"))

    def details(self) -> dict[str, Any]:
        """What its first rank says of its updates."""
        return self._ask("details")[0]

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
        if self.setting.processes == 1:
            self._process.kill()
        else:
            self._process.terminate()  # the launcher ends its ranks
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_SECONDS)
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, address: str) -> subprocess.Popen:
        command = [sys.executable]
        if self.setting.processes > 1 and self.setting.is_of("torch"):
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.setting.processes}"]
        elif self.setting.processes > 1:
            command += ["-m", "gaccum_ms.launch", "-n", str(self.setting.processes)]
            command += ["--log-dir", str(Path(self._folder.name, "log")), "--timeout", str(_RANKS_LIMIT_SECONDS)]
        with self._messages.open("wb") as messages:
            return subprocess.Popen(
                [*command, str(_WORKER), self.setting.module, json.dumps(asdict(self.setting)), address],
                stdin=subprocess.DEVNULL,
                stdout=messages,
                stderr=messages,
                cwd=self._folder.name,
                env=environment(self.setting),
            )

    def _accept(self, listener: socket.socket, deadline: float) -> Connection:
        while not select.select([listener], [], [], _POLL_SECONDS)[0]:
            if self._process.poll() is not None:
                raise WorkerError(f"failed: {self._last_words()}")
            if time.monotonic() > deadline:
                raise WorkerError(f"> {self._limit:.0f} s")
        return Connection(listener.accept()[0].detach())

    def _ask(self, command: str, number: int = 0) -> list[Any]:
        """Every rank's answer."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # it has ended: so it does not answer
                rank.send((command, number))
        return self._answers()

    def _answers(self) -> list[Any]:
        deadline = time.monotonic() + self._limit
        answers = []
        for rank in self._ranks:
            if not rank.poll(max(0.0, deadline - time.monotonic())):
                raise WorkerError(f"> {self._limit:.0f} s")
            try:
                answers.append(rank.recv())
            except (EOFError, OSError):
                raise WorkerError(f"failed: {self._last_words()}") from None
        return answers

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_SECONDS)
        messages = self._messages.read_text(errors="replace")
        return last_words(messages) or f"exit status {self._process.returncode}"


def last_words(messages: str) -> str:
    """The error line of a failed program: frameworks print more lines after it, and PyTorch puts the rank before it."""
    lines = [re.sub(r"^\[rank\d+\]:", "", line).strip() for line in messages.splitlines()]
    errors = [line for line in lines if re.match(r"\w*(Error|Exception)\b", line)]
    return ["", *filter(None, lines), *errors][-1][:100]


def groups(
    network: str, ways: Sequence[str], micro_sizes: Sequence[int], processes: Sequence[int], batch: int
) -> list[list[Setting]]:
    """The programs to measure, in groups; each has the whole batch. Programs of several ranks are in separate groups,
    with all numbers of ranks together."""

    def setting(way: str, micro_size: int, ranks: int = 1) -> Setting:
        return Setting(network, way, micro_size, batch, processes=ranks)

    base = [WHOLE] if WHOLE in ways else []
    others = [way for way in ways if way != WHOLE]
    found: list[list[Setting]] = []
    for size in [size for size in micro_sizes if size <= batch] if 1 in processes else []:
        fitting = [way for way in others if size in (WAYS[way].micro_sizes or (size,))]
        found.append([setting(way, 1) for way in base] + [setting(way, size) for way in fitting])
    ranks = [number for number in processes if 1 < number <= batch]
    parallel = [way for way in others if WAYS[way].parallel]
    for size in micro_sizes if ranks else []:
        group = [setting(way, 1, number) for way in base for number in ranks]
        group += [setting(way, min(size, batch // number), number) for way in parallel for number in ranks]
        if group not in found:
            found.append(list(dict.fromkeys(group)))
    return found


def measure(
    settings: Sequence[Setting], group: str, *, rounds: int, turn: float, limit: float, log: Log, seconds: float = 0
) -> list[Row]:
    """One row for each program of the group: its turns, of about `turn` seconds each, and then its peak memory. There
    are at least `rounds` rounds, and up to `MOST_ROUNDS` within `seconds` ."""
    rows = [Row(one.network, one.way, one.micro_size, one.processes, group, one.batch) for one in settings]
    with ExitStack() as stack:
        workers: dict[int, Worker] = {}
        for index, (row, setting) in enumerate(zip(rows, settings, strict=True)):
            if not is_installed(setting.described):
                row.note = "not installed"
                continue
            log(f"{group}: first call of {row.way}, micro_size {row.micro_size}, {row.processes} process(es)")
            try:
                worker = stack.enter_context(Worker(setting, limit))
            except WorkerError as error:
                row.note = str(error)
                continue
            workers[index] = worker
            row.first_call = worker.first_call
            row.trains = worker.trains
            vars(row).update(worker.about)
        number, begin = 0, time.monotonic()
        while workers and (number <= rounds or (number <= MOST_ROUNDS and time.monotonic() - begin < seconds)):
            log(f"{group}: round {number}")
            order = list(workers)
            for index in order[number % len(order) :] + order[: number % len(order)]:
                try:
                    times = workers[index].turn(turn)
                except WorkerError as error:
                    rows[index].note = str(error)
                    rows[index].turns.clear()  # turns are paired by round: incomplete turns would be paired wrongly
                    workers.pop(index).close()
                else:
                    rows[index].turns += [times] if number else []
            number += 1
        for index, worker in workers.items():
            try:
                rows[index].peak, rows[index].details = worker.peak(), worker.details()
            except WorkerError as error:
                rows[index].note = f"memory {error}"
    return rows


def measure_base_peaks(rows: Iterable[Row], *, limit: float, log: Log) -> None:
    """Peak memory of the same programs with micro-batches of one sample: the framework, compilation, weights, the
    optimizer's state and accumulators. Programs of several ranks are left out."""
    peaks: dict[Setting, int | str] = {}
    for row in rows:
        if row.peak is None or row.processes > 1 or row.micro_size >= row.batch:
            continue  # several ranks, or already micro-batches of one sample
        setting = Setting(row.network, row.way, row.micro_size, row.micro_size)
        if setting not in peaks:
            log(f"{row.network}: memory of {row.way} at {row.micro_size} micro-batches of one sample")
            try:
                with Worker(setting, limit) as worker:
                    worker.updates(_BASELINE_UPDATES)
                    peaks[setting] = worker.peak()
            except WorkerError as error:
                peaks[setting] = f"memory {error}"
        found = peaks[setting]
        if isinstance(found, str):
            row.note = found
        else:
            row.base_peak = found


def is_installed(way: Way) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in way.packages)
