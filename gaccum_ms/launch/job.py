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

from gaccum_ms.launch import cuda, guard, logs
from gaccum_ms.launch.cluster import JOB, Cluster, LaunchError, reserved_port
from gaccum_ms.launch.output import Tail, write
from gaccum_ms.launch.restarts import Restarts
from gaccum_ms.launch.supervisor import Ranks, Reports

POLL_SECONDS = 0.2
LOOK_SECONDS = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Over = frozenset[int]  # the ranks whose script has ended well
Steps = Generator[Over, Over | None, Cluster]


def launch(
    cluster: Cluster,
    command: list[str],  # the script that each rank runs, and its arguments
    log_dir: Path,
    timeout: float = 0,  # seconds after which all ranks are ended, over all restarts; 0: never
    parent: Mapping[str, str] = os.environ,  # the environment that the ranks get
    out: Callable[[bytes], OSError | None] = write,  # shows the output, and returns the error if that failed
    restarts: Restarts | None = None,  # decides on restarts; None: there are none
) -> Steps:
    """Run `command` on this host's ranks until all have ended, showing the output of the first one meanwhile.

    It is a generator, which goes on for a moment at each step. It yields this host's ranks whose script has ended, and
    may be sent those of all hosts. Closing it ends all processes. A `LaunchError` says why the launch cannot start, or
    which rank has failed once too often.
    """
    deadline = time.monotonic() + timeout if timeout else math.inf
    with contextlib.ExitStack() as stack:
        stack.enter_context(logs.locked(log_dir))
        logs.prepare(cluster, log_dir)
        if cluster.node_rank == 0:
            port = stack.enter_context(reserved_port(cluster.master_addr, cluster.master_port))
            cluster = dataclasses.replace(cluster, master_port=port)
        while True:
            begin = time.monotonic()
            try:
                with contextlib.closing(Reports(f"{os.getpid()}-{uuid.uuid4().hex}")) as reports:
                    yield from _attempt(cluster, command, log_dir, reports, deadline, timeout, parent, out)
                return cluster
            except LaunchError as error:
                following = restarts.after(cluster, error, time.monotonic() - begin) if restarts else None
                if following is None:
                    why = "\n".join(filter(None, [str(error), logs.why_full(log_dir)]))
                    raise LaunchError(why, error.code, error.rank, error.since) from None
                anew = f"note: all begin anew: restart {cluster.attempt} of {cluster.max_restarts}."
                print(f"{error}\n{anew}", file=sys.stderr, flush=True)
                cluster = following


def _attempt(
    cluster: Cluster,
    command: list[str],
    log_dir: Path,
    reports: Reports,
    deadline: float,
    timeout: float,
    parent: Mapping[str, str],
    out: Callable[[bytes], OSError | None],
) -> Generator[Over, Over | None, None]:
    """One attempt: all ranks of this host, from their start to their end."""
    ranks, looked, left = Ranks(cluster, log_dir), time.monotonic(), False
    tail = Tail(logs.rank_folder(log_dir, cluster.local_ranks[0], cluster.attempt) / "stdout")
    try:
        process = _start(cluster, command, log_dir, parent, reports.job)
        while not ranks.ended:
            ended = process.poll() is not None  # checked first: then all messages of its guards have arrived
            for message in reports.read(POLL_SECONDS):
                if message.get("code") or "fails" in message:
                    message["log"] = logs.rank_logs(log_dir, int(str(message["rank"])), cluster.attempt)
                ranks.note(message)
            if time.monotonic() - looked > LOOK_SECONDS:
                looked = time.monotonic()
                ranks.look()
                reports.send(ranks.running() if ranks.over else (), guard.ASK)
            tail.copy(out)
            if tail.unread:  # for example `| head` has ended
                raise SystemExit(128 + signal.SIGPIPE)
            ranks.check()
            if ended and (silent := ranks.silent()):
                what = f"{cluster.launcher} ended with exit code {process.returncode}; ranks {silent} never finished"
                raise LaunchError(
                    what + logs.last_lines(logs.launcher_folder(log_dir, cluster) / f"{cluster.launcher}.log")
                )
            if time.monotonic() > deadline:
                late = f"ranks {ranks.running()} had not ended after {timeout:g} s"
                raise LaunchError(f"time ran out: {late}; all were ended.", 124)
            if ranks.may_leave and not left:
                left = True
                reports.send(cluster.local_ranks, guard.LET_GO)
            ranks.note_over((yield ranks.over) or ())
    finally:
        with signals_ignored():
            end_all(reports.job)
            tail.copy(out)


def _start(
    cluster: Cluster, command: list[str], log_dir: Path, parent: Mapping[str, str], job: str
) -> subprocess.Popen:
    """Start `command` on this host's ranks, and MindSpore's scheduler with mpirun; msrun starts it itself."""
    logs.make_folders(cluster, log_dir)
    env = cluster.environment(parent, len(os.sched_getaffinity(0))) | {JOB: job}
    if of_cuda := cuda.environment(log_dir / ".cuda", env):
        logs.mark(log_dir / ".cuda")
    env |= of_cuda
    folder = logs.launcher_folder(log_dir, cluster)
    prefix = cluster.command(folder, env)
    # -I: the guard must not import modules of the user's folders
    guarded = ["-I", guard.__file__, "--guard", str(log_dir / str(cluster.attempt)), *command]
    if cluster.launcher == "mpirun":
        _spawn([sys.executable, *guarded], folder / "scheduler.log", env | {"MS_ROLE": "MS_SCHED"})
    return _spawn([*prefix, *guarded], folder / f"{cluster.launcher}.log", env)


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
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
    kill_from = time.monotonic() + grace_seconds
    while left := [pid for pid in guard.processes_of(job) if pid != os.getpid()]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if time.monotonic() > kill_from else signal.SIGTERM)
        time.sleep(POLL_SECONDS)
