"""One launch on this host: starts its processes together, watches them, ends them together, and restarts them if
requested.

All its processes have one environment variable, by which they are found and ended: ending msrun alone leaves its
workers running.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path

from gaccum_ms.launch import cuda, guard
from gaccum_ms.launch.cluster import JOB, Cluster, LaunchError, reserved_port
from gaccum_ms.launch.logs import (
    last_lines,
    launcher_folder,
    locked,
    make_folders,
    mark,
    prepare,
    rank_folder,
    rank_logs,
    why_full,
)
from gaccum_ms.launch.output import Tail, write
from gaccum_ms.launch.restarts import Restarts
from gaccum_ms.launch.supervisor import Message, Ranks, Reports

POLL_SECONDS = 0.2
LOOK_SECONDS = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Over = frozenset[int]  # the ranks whose script has ended well
Steps = Generator[Over, Over | None, Cluster]


def launch(
    cluster: Cluster,
    command: list[str],
    log_dir: Path,
    timeout: float = 0,
    parent: Mapping[str, str] = os.environ,
    out: Callable[[bytes], OSError | None] = write,
    restarts: Restarts | None = None,
) -> Steps:
    """Run `command` on this host's ranks until all have ended, showing the output of the first one meanwhile.

    It is a generator, which goes on for a moment at each step. It yields this host's ranks whose script has ended, and
    may be sent those of all hosts. Closing it ends all processes.

    Args:
        cluster (Cluster): The ranks and hosts.
        command (list[str]): The script that each rank runs, and its arguments.
        log_dir (Path): The folder of the logs. Only one launch at a time can use it.
        timeout (float): Seconds after which all ranks are ended, over all restarts. 0: never.
        parent (Mapping[str, str]): The environment that the ranks get, without another cluster's variables.
        out (Callable): Shows the output, and returns the error if that failed.
        restarts (Restarts or None): Decides on restarts. None: there are none.

    Returns:
        Cluster, of the attempt that succeeded.

    Raises:
        LaunchError: If the launch cannot start, a rank fails once too often, or time runs out; no process is left then.
    """
    with locked(log_dir):
        prepare(cluster, log_dir)
        try:
            with contextlib.ExitStack() as stack:
                if cluster.node_rank == 0:
                    port = stack.enter_context(reserved_port(cluster.master_addr, cluster.master_port))
                    cluster = dataclasses.replace(cluster, master_port=port)
                deadline = time.monotonic() + timeout if timeout else math.inf
                while True:
                    begin = time.monotonic()
                    with Reports(f"{os.getpid()}-{uuid.uuid4().hex}") as reports:
                        attempt = _Attempt(cluster, log_dir, reports, deadline, timeout, out)
                        try:
                            yield from attempt.run(command, parent)
                            return cluster
                        except LaunchError as error:
                            seconds = time.monotonic() - begin
                            following = None if restarts is None else restarts.after(cluster, error, seconds)
                            if following is None:
                                raise
                            anew = f"note: all begin anew: restart {cluster.attempt} of {cluster.max_restarts}."
                            print(f"{error}\n{anew}", file=sys.stderr, flush=True)
                    cluster = following
        except LaunchError as error:
            full = why_full(log_dir)
            raise LaunchError(f"{error}\n{full}", error.code, error.rank, error.since) if full else error from None


class _Attempt:
    """One attempt: all ranks of this host, from their start to their end."""

    def __init__(
        self,
        cluster: Cluster,
        log_dir: Path,
        reports: Reports,
        deadline: float,
        timeout: float,
        out: Callable[[bytes], OSError | None],
    ) -> None:
        self._cluster, self._log_dir, self._reports = cluster, log_dir, reports
        self._deadline, self._timeout, self._out = deadline, timeout, out
        self._ranks = Ranks(cluster, log_dir)
        self._looked = time.monotonic()

    def run(self, command: list[str], parent: Mapping[str, str]) -> Generator[Over, Over | None, None]:
        """Run the ranks.

        Raises:
            LaunchError: If one fails.
        """
        tail = Tail(rank_folder(self._log_dir, self._cluster.local_ranks[0], self._cluster.attempt) / "stdout")
        try:
            process = self._start(command, parent)
            while not self._ranks.ended:
                self._process(self._news(process))
                tail.copy(self._out)
                if tail.unread:  # for example `| head` has ended
                    raise SystemExit(128 + signal.SIGPIPE)
                self._ranks.check()
                self._ranks.note_over((yield self._ranks.over) or ())
        finally:
            with _signals_ignored():
                end_all(self._reports.job)
                tail.copy(self._out)

    def _start(self, command: list[str], parent: Mapping[str, str]) -> subprocess.Popen:
        """Start `command` on this host's ranks, and MindSpore's scheduler with mpirun; msrun starts it itself."""
        make_folders(self._cluster, self._log_dir)
        env = self._cluster.environment(parent, len(os.sched_getaffinity(0))) | {JOB: self._reports.job}
        of_cuda = cuda.environment(self._log_dir / ".cuda", env)
        if of_cuda:
            mark(self._log_dir / ".cuda")
        env |= of_cuda
        logs = launcher_folder(self._log_dir, self._cluster)
        prefix = self._cluster.command(logs, env)
        # -I: the guard must not import modules of the user's folders
        ranks = self._log_dir / str(self._cluster.attempt)
        guarded = ["-I", guard.__file__, "--guard", str(ranks), *command]
        if self._cluster.launcher == "mpirun":
            scheduler = [sys.executable, *guarded]
            _spawn(scheduler, logs / "scheduler.log", env | {"MS_ROLE": "MS_SCHED"})
        return _spawn([*prefix, *guarded], logs / f"{self._cluster.launcher}.log", env)

    def _news(self, process: subprocess.Popen) -> list[Message]:
        """The events, after waiting a moment for one."""
        ended = process.poll() is not None  # checked first: then all messages of its guards have arrived
        news = self._reports.read(POLL_SECONDS)
        now = time.monotonic()
        if now - self._looked > LOOK_SECONDS:
            news += self._ranks.look()
            self._looked = now
            if self._ranks.over:
                for number in self._ranks.running():
                    self._reports.ask(number)
        for message in news:
            if message.get("code") or "fails" in message:
                number = int(str(message["rank"]))
                message["log"] = rank_logs(self._log_dir, number, self._cluster.attempt)
        if ended and (silent := self._ranks.silent(news)):
            what = f"{self._cluster.launcher} ended with exit code {process.returncode}; ranks {silent} never finished"
            folder = launcher_folder(self._log_dir, self._cluster)
            log = last_lines(folder / f"{self._cluster.launcher}.log")
            news.append({"error": f"{what}{log}", "code": 1})
        if now > self._deadline:
            late = f"had not ended after {self._timeout:g} s"
            what = f"time ran out: ranks {self._ranks.running()} {late}; all were ended."
            news.append({"error": what, "code": 124})
        return news

    def _process(self, news: list[Message]) -> None:
        """Process the events, and tell the ranks when they may leave."""
        waited = not self._ranks.may_leave
        for message in news:
            self._ranks.note(message)
        if self._ranks.may_leave and waited:
            for number in self._cluster.local_ranks:
                self._reports.let_go(number)


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """Ignore signals: a second Ctrl+C must not leave processes behind."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _spawn(command: list[str], log: Path, env: dict[str, str]) -> subprocess.Popen:
    with log.open("wb") as output:
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def end_all(job: str, grace_seconds: float = 3.0) -> None:
    """End every process of one launch: SIGTERM, `grace_seconds` later SIGKILL, until none is left."""
    import psutil

    def running() -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(JOB) == job and process.pid != os.getpid():
                    yield process

    kill_from = time.monotonic() + grace_seconds
    while left := list(running()):
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill() if time.monotonic() > kill_from else process.terminate()
        psutil.wait_procs(left, timeout=0.5)
