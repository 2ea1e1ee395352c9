"""One launch on this host: starts its processes together, watches them, ends them together, and restarts them if
requested.

All its processes are below a keeper (see `guard.py` ), or below this process if the keeper is killed, and so they are
found and ended: ending msrun alone leaves its workers running. An environment variable finds what left the tree.
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
from typing import BinaryIO, NamedTuple

from gaccum_ms.launch import cuda, guard, logs
from gaccum_ms.launch.cluster import JOB, Cluster, LaunchError, reserved_port
from gaccum_ms.launch.output import say, write
from gaccum_ms.launch.restarts import Restarts
from gaccum_ms.launch.supervisor import Ranks, Reports

POLL_SECONDS = 0.2
LOOK_SECONDS = 1.0
SHOWN_BYTES = 1 << 20  # of the output, at most, at a time: a reader may have stood still for long
END_SECONDS = 3.0  # for processes that get SIGTERM; then SIGKILL
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Over = frozenset[int]  # the ranks whose script has ended well
Steps = Generator[tuple[Cluster, Over], Over | None, None]


class Job(NamedTuple):
    """A script that runs on this host's ranks."""

    command: list[str]  # the script, and its arguments
    log_dir: Path
    timeout: float = 0  # seconds after which all ranks are ended, over all restarts; 0: never
    parent: Mapping[str, str] = os.environ  # the environment that the ranks get
    out: Callable[[bytes], OSError | None] = write  # shows the output, and returns the error if that failed
    restarts: Restarts | None = None  # decides on restarts; None: there are none

    def run(self, cluster: Cluster) -> Steps:
        """Run until all ranks have ended, showing the output of the first one meanwhile.

        It is a generator, which goes on for a moment at each step. It yields the present attempt, and this host's ranks
        whose script has ended; it may be sent those of all hosts. Closing it ends all processes. A `LaunchError` says
        why the launch cannot start, or which rank has failed once too often.
        """
        deadline = time.monotonic() + self.timeout if self.timeout else math.inf
        with contextlib.ExitStack() as stack:
            stack.enter_context(logs.locked(self.log_dir))
            logs.prepare(cluster, self.log_dir)
            if cluster.node_rank == 0:
                port = stack.enter_context(reserved_port(cluster.master_addr, cluster.master_port))
                cluster = dataclasses.replace(cluster, master_port=port)
            while True:
                begin = time.monotonic()
                try:
                    yield from self._attempt(cluster, deadline)
                    return
                except LaunchError as error:
                    following = self.restarts and self.restarts.after(cluster, error, time.monotonic() - begin)
                    if not following:
                        why = "\n".join(filter(None, [str(error), logs.why_full(self.log_dir)]))
                        raise LaunchError(why, error.code, error.rank, error.since) from None
                    cluster = following

    def _attempt(self, cluster: Cluster, deadline: float) -> Steps:
        """One attempt: all ranks of this host, from their start to their end."""
        import psutil

        ranks, looked, left = Ranks(cluster, self.log_dir), time.monotonic(), False
        logs.make_folders(cluster, self.log_dir)
        first = logs.rank_folder(self.log_dir, cluster.local_ranks[0], cluster.attempt) / "stdout"
        job, keepers = uuid.uuid4().hex, list[subprocess.Popen]()
        guard.adopt_orphans()  # those of a keeper that is killed
        not_ours = {child.pid for child in psutil.Process().children()}  # as `command & exec gaccum-ms run` leaves them
        with contextlib.closing(Reports(job)) as reports, first.open("a+b") as stdout:
            try:
                self._start(cluster, job, keepers)
                more = False
                while ranks.silent():
                    killed = [keeper for keeper in keepers if keeper.poll() is not None]
                    for message in reports.read(0 if more else POLL_SECONDS):
                        ranks.note(message)
                    for keeper in killed:
                        ranks.note({"rank": guard.STARTER, "code": guard.as_in_shells(keeper.returncode)})
                    if time.monotonic() - looked > LOOK_SECONDS:
                        looked = time.monotonic()
                        ranks.look()
                    more = self._shows(stdout)
                    ranks.check()
                    if time.monotonic() > deadline:
                        late = f"ranks {ranks.running()} had not ended after {self.timeout:g} s"
                        raise LaunchError(f"time ran out: {late}; all were ended.", 124)
                    if len(ranks.over) == cluster.size and not left:
                        left = True
                        reports.let_go(cluster.local_ranks)
                    ranks.note_over((yield cluster, frozenset(ranks.over)) or ())
                while self._shows(stdout):
                    yield cluster, frozenset(ranks.over)
            finally:
                with signals_ignored():
                    others = guard.end_all(job, END_SECONDS, spared=not_ours)
                    for keeper in keepers:
                        keeper.wait()
                if others:
                    say(f"note: other users' processes were not ended: {sorted(others)}\n")
                if (left_out := os.fstat(stdout.fileno()).st_size - stdout.tell() - SHOWN_BYTES) > 0:
                    stdout.seek(left_out, os.SEEK_CUR)
                    say(f"note: much of the output is only in '{first}'\n")
                self._shows(stdout)

    def _shows(self, stdout: BinaryIO) -> bool:
        """Show some of the output, and return whether there is probably more."""
        data = stdout.read(SHOWN_BYTES)
        if isinstance(self.out(data), BrokenPipeError):  # for example `| head` has ended
            raise SystemExit(128 + signal.SIGPIPE)
        return len(data) == SHOWN_BYTES

    def _start(self, cluster: Cluster, job: str, keepers: list[subprocess.Popen]) -> None:
        """Start the script on this host's ranks, and MindSpore's scheduler with mpirun; msrun starts it itself."""
        env = cluster.environment(self.parent, len(os.sched_getaffinity(0))) | {JOB: job}
        if of_cuda := cuda.environment(self.log_dir / ".cuda", env):
            logs.mark(self.log_dir / ".cuda")
        env |= of_cuda
        folder = logs.launcher_folder(self.log_dir, cluster)
        prefix = cluster.command(folder, env)
        # -I: the guard must not import modules of the user's folders
        guarded = ["-I", guard.__file__, "--guard", str(self.log_dir / str(cluster.attempt)), *self.command]
        if cluster.launcher == "mpirun":
            schedules = [sys.executable, *guarded]
            keepers.append(_spawn(schedules, folder / "scheduler.log", env | {"MS_ROLE": "MS_SCHED"}))
        keepers.append(_spawn([*prefix, *guarded], folder / f"{cluster.launcher}.log", env))


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
    """Start a keeper, which runs a command."""
    command = [sys.executable, "-I", guard.__file__, "--keep", *command]
    with log.open("wb") as output:
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
