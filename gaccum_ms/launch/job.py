"""One launch: starts its processes together, watches them, ends them together, and restarts them if requested.

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
from collections.abc import Iterator
from pathlib import Path

from gaccum_ms.launch import cuda, guard
from gaccum_ms.launch.cluster import JOB, Cluster, LaunchError, held_port
from gaccum_ms.launch.hosts import Link, link
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
from gaccum_ms.launch.output import Tail
from gaccum_ms.launch.restarts import Restarts
from gaccum_ms.launch.supervisor import Ranks, Reports
from gaccum_ms.launch.wire import Message

POLL_SECONDS = 0.2
LOOK_SECONDS = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(cluster: Cluster, command: list[str], log_dir: Path, timeout: float = 0) -> Cluster:
    """Run `command` on every rank until all have ended, showing the output of this host's first rank meanwhile.

    Args:
        cluster (Cluster): The ranks and hosts.
        command (list[str]): The script that each rank runs, and its arguments.
        log_dir (Path): The folder of the logs. Only one launch at a time can use it.
        timeout (float): Seconds after which all ranks are ended, over all restarts. 0: never.

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
                    port = stack.enter_context(held_port(cluster.master_addr, cluster.master_port))
                    cluster = dataclasses.replace(cluster, master_port=port)
                hosts = stack.enter_context(link(cluster))
                deadline = time.monotonic() + timeout if timeout else math.inf
                restarts, following = Restarts(), cluster
                while True:
                    cluster = _meet(hosts, following, deadline)
                    with Reports(f"{os.getpid()}-{uuid.uuid4().hex}") as reports:
                        attempt = _Attempt(cluster, log_dir, hosts, reports, deadline, timeout)
                        then = attempt.run(command, restarts)
                    if then is None:
                        return cluster
                    following = then
        except LaunchError as error:
            full = why_full(log_dir)
            raise LaunchError(f"{error}\n{full}", error.code) if full else error from None


def _meet(hosts: Link, cluster: Cluster, deadline: float) -> Cluster:
    """Wait until all hosts have joined."""
    end: Message = {"end": True, "error": f"host {hosts.cluster.node_rank} was told to end.", "code": 1}
    try:
        while True:
            if met := hosts.meet(cluster):
                return met
            if time.monotonic() > deadline:
                raise LaunchError("time ran out: not all hosts were there.", 124)
            time.sleep(POLL_SECONDS)
    except LaunchError as error:
        end |= {"error": str(error), "code": error.code}
        hosts.send(end)
        raise
    except SystemExit:
        hosts.send(end)
        raise


class _Attempt:
    """One attempt: all ranks of this host, from their start to their end."""

    def __init__(
        self, cluster: Cluster, log_dir: Path, hosts: Link, reports: Reports, deadline: float, timeout: float
    ) -> None:
        self._cluster, self._log_dir, self._hosts, self._reports = cluster, log_dir, hosts, reports
        self._deadline, self._timeout = deadline, timeout
        self._ranks = Ranks(cluster, log_dir)
        self._begin = self._looked = time.monotonic()

    def run(self, command: list[str], restarts: Restarts) -> Cluster | None:
        """Run the ranks; if they fail, return the cluster of the restart.

        Raises:
            LaunchError: If there is no restart.
        """
        host, attempt = self._hosts.cluster.node_rank, self._cluster.attempt
        tail = Tail(rank_folder(self._log_dir, self._cluster.local_ranks[0], attempt) / "stdout")
        word: Message = {"end": True, "error": f"host {host} was told to end.", "code": 1}
        then = None
        try:
            process = self._start(command)
            while not self._ranks.ended:
                self._pass_on(self._news(process))
                tail.copy()
                if tail.unread:  # for example `| head` has ended
                    word["error"] = f"nobody reads the output of host {host}."
                    raise SystemExit(128 + signal.SIGPIPE)
                self._ranks.check()
            word = {"end": True}
        except LaunchError as error:
            word |= {"error": str(error), "code": error.code}
            then = restarts.after(self._cluster, error, time.monotonic() - self._begin)
            if then is None:
                raise
            word = {"again": attempt, "error": str(error), "code": error.code}
        finally:
            with _left_alone():
                self._hosts.send(word)
                end_all(self._reports.job)
                tail.copy()
        if then is not None:
            anew = f"note: all begin anew: restart {attempt} of {self._cluster.max_restarts}."
            print(f"{word['error']}\n{anew}", file=sys.stderr, flush=True)
        return then

    def _start(self, command: list[str]) -> subprocess.Popen:
        """Start `command` on this host's ranks, and MindSpore's scheduler with mpirun; msrun starts it itself."""
        make_folders(self._cluster, self._log_dir)
        env = self._cluster.environment(os.environ, len(os.sched_getaffinity(0))) | {JOB: self._reports.job}
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
        """The events on this host, after waiting a moment for one."""
        ended = process.poll() is not None  # checked first: then all messages of its guards have arrived
        news = self._reports.read(POLL_SECONDS)
        now = time.monotonic()
        if now - self._looked > LOOK_SECONDS:
            news += self._ranks.look()
            self._looked = now
            if self._ranks.one_is_over:
                for number in set(self._ranks.running()) & set(self._cluster.local_ranks):
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

    def _pass_on(self, news: list[Message]) -> None:
        """Process the events here and on other hosts, and pass them on."""
        if self._cluster.node_rank != 0:
            for message in news:
                self._hosts.send(message)
        had_leave, had_over = self._ranks.may_leave, self._ranks.one_is_over
        for message in [*news, *self._hosts.receive()]:
            self._ranks.note(message)
        if self._cluster.node_rank == 0 and self._ranks.one_is_over and not had_over:
            self._hosts.send({"over": True})
        if self._ranks.may_leave and not had_leave:
            if self._cluster.node_rank == 0:
                self._hosts.send({"go": True})
            for number in self._cluster.local_ranks:
                self._reports.let_go(number)


@contextlib.contextmanager
def _left_alone() -> Iterator[None]:
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
