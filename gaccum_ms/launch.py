"""Start a script on several processes, of one host or of several, and end them together.

    python -m gaccum_ms.launch --processes 8 train.py --epochs 3

starts one tree of processes::

    this program ── msrun or mpirun ── one guard per rank (`rank.py`) ── the rank, which runs the script

Each rank's output is in ``log_output/1/rank.N/stdout`` and ``stderr``. The guards tell this program how their ranks
fare, so it learns which rank failed first in the same way from either launcher. Every process that it starts carries
one variable of its environment, by which all of them are found and ended: ending msrun alone leaves its workers
running.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
import types
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO

if __package__ in (None, ""):  # run as a file: our package, without the __init__ that would import MindSpore
    sys.modules["gaccum_ms"] = types.ModuleType("gaccum_ms")
    sys.modules["gaccum_ms"].__path__ = [str(Path(__file__).parent)]

from gaccum_ms import gpu, rank
from gaccum_ms.cluster import JOB, MASTER_PORT, Cluster, LaunchError, held_port
from gaccum_ms.nodes import Link, Message, link
from gaccum_ms.ranks import Ranks, Reports, last_lines, rank_folder, rank_logs

POLL_SECONDS = 0.2
LOOK_SECONDS = 1.0
PROBE_BYTES = 65536
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(cluster: Cluster, command: list[str], log_dir: Path, timeout: float = 0) -> None:
    """Run `command` on every rank until all have ended, showing the output of this host's first rank meanwhile.

    Args:
        cluster (Cluster): The ranks and hosts.
        command (list[str]): The script that each rank runs, and its arguments.
        log_dir (Path): Where the logs go. One launch at a time can use it.
        timeout (float): Seconds after which all ranks are ended. 0: never.

    Raises:
        LaunchError: If the launch cannot start, a rank fails, or time runs out; no process is left then.
    """
    with _locked(log_dir):
        _prepare(cluster, log_dir)
        try:
            with contextlib.ExitStack() as stack:
                if cluster.node_rank == 0:
                    port = stack.enter_context(held_port(cluster.master_addr, cluster.master_port))
                    cluster = dataclasses.replace(cluster, master_port=port)
                hosts = stack.enter_context(link(cluster))
                job = f"{os.getpid()}-{uuid.uuid4().hex}"
                reports = stack.enter_context(Reports(job))
                _Launch(cluster, log_dir, hosts, reports, job).run(command, timeout)
        except LaunchError as error:
            full = _why_full(log_dir)
            raise LaunchError(f"{error}\n{full}", error.code) if full else error from None


class _Launch:
    """One launch under way."""

    def __init__(self, cluster: Cluster, log_dir: Path, hosts: Link, reports: Reports, job: str) -> None:
        self._cluster, self._log_dir, self._hosts, self._reports, self._job = cluster, log_dir, hosts, reports, job
        self._ranks = Ranks(cluster, log_dir)
        self._begin = self._looked = time.monotonic()

    def run(self, command: list[str], timeout: float) -> None:
        tail = Tail(rank_folder(self._log_dir, self._cluster.local_ranks[0]) / "stdout")
        end: Message = {"end": True, "error": f"host {self._cluster.node_rank} was told to end.", "code": 1}
        try:
            process = self._start(command)
            while not self._ranks.ended:
                self._pass_on(self._news(process, timeout))
                tail.copy()
                self._ranks.check(self._hosts.absent())
            end = {"end": True}
        except LaunchError as error:
            end |= {"error": str(error), "code": error.code}
            raise
        finally:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # a second Ctrl+C must not leave processes behind
            self._hosts.send(end)
            end_all(self._job)
            tail.copy()

    def _start(self, command: list[str]) -> subprocess.Popen:
        """Start `command` on this host's ranks, and MindSpore's scheduler where the launcher does not."""
        env = self._cluster.environment(os.environ, len(os.sched_getaffinity(0))) | {JOB: self._job}
        env |= gpu.environment(self._log_dir / ".cuda", env)
        prefix = self._cluster.command(self._log_dir, env)
        # -I: modules of the user's folders are not for the guard
        guard = ["-I", rank.__file__, "--guard", str(self._log_dir), *command]
        if self._cluster.launcher == "mpirun":
            scheduler = [sys.executable, *guard]
            _spawn(scheduler, self._log_dir / "scheduler.log", env | {"MS_ROLE": "MS_SCHED"})
        return _spawn([*prefix, *guard], self._log_dir / f"{self._cluster.launcher}.log", env)

    def _news(self, process: subprocess.Popen, timeout: float) -> list[Message]:
        """What has happened on this host, after waiting a moment for something to happen."""
        ended = process.poll() is not None  # asked first: what its guards said before is then there to be read
        news = self._reports.read(POLL_SECONDS)
        now = time.monotonic()
        if now - self._looked > LOOK_SECONDS:
            news += self._ranks.look()
            self._looked = now
        for message in news:
            if message.get("code"):
                number = int(str(message["rank"]))
                message["log"] = rank_logs(self._log_dir, number)
        if ended and (silent := self._ranks.silent(news)):
            what = f"{self._cluster.launcher} ended with exit code {process.returncode}; ranks {silent} never finished"
            log = last_lines(self._log_dir / f"{self._cluster.launcher}.log")
            news.append({"error": f"{what}{log}", "code": 1})
        if timeout and now - self._begin > timeout:
            what = f"time ran out: ranks {self._ranks.running()} had not ended after {timeout:g} s; all were ended."
            news.append({"error": what, "code": 124})
        return news

    def _pass_on(self, news: list[Message]) -> None:
        """Take in what has happened here and on other hosts, and tell who needs to know."""
        if self._cluster.node_rank != 0:
            for message in news:
                self._hosts.send(message)
        had_leave = self._ranks.may_leave
        for message in [*news, *self._hosts.receive()]:
            self._ranks.note(message)
        if self._ranks.may_leave and not had_leave:
            if self._cluster.node_rank == 0:
                self._hosts.send({"go": True})
            for number in self._cluster.local_ranks:
                self._reports.let_go(number)


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


class Tail:
    """Copies what is added to a file to this program's standard output."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    def copy(self) -> None:
        """Copy what was added since the last call."""
        if self._file is None and self._path.exists():
            self._file = self._path.open("rb")
        if self._file is not None:
            sys.stdout.buffer.write(self._file.read())
            sys.stdout.flush()


@contextlib.contextmanager
def _locked(log_dir: Path) -> Iterator[None]:
    """Make the log folder and keep other launches out of it."""
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        lock = (log_dir / ".lock").open("w")
    except OSError as error:
        raise _unwritable(log_dir, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LaunchError(f"another launch writes to '{log_dir}'. Name another --log-dir.", 2) from None
        yield


def _prepare(cluster: Cluster, log_dir: Path) -> None:
    """Remove an older launch's logs, which would be taken for ours, and make the folders of this host's ranks."""
    try:
        for name in ("1", "msrun", ".cuda"):
            if (log_dir / name).exists():
                shutil.rmtree(log_dir / name)
        for number in cluster.local_ranks:
            rank_folder(log_dir, number).mkdir(parents=True)
        if cluster.launcher == "msrun":
            (log_dir / "msrun").mkdir()
    except OSError as error:
        raise _unwritable(log_dir, error) from error
    if full := _why_full(log_dir):
        raise LaunchError(full, 2)


def _why_full(log_dir: Path) -> str:
    """Why the log folder takes no more data, or nothing. Ranks that cannot write fail, and cannot write why."""
    probe = log_dir / ".probe"
    try:
        with contextlib.closing(probe.open("wb", buffering=0)) as file:
            left = PROBE_BYTES
            while left:
                left -= file.write(bytes(left))
        probe.unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            probe.unlink()
        return f"'{log_dir}' takes no more logs: {error.strerror}. Make room there, or name another --log-dir."
    return ""


def _unwritable(log_dir: Path, error: OSError) -> LaunchError:
    return LaunchError(f"cannot write logs to '{log_dir}': {error.strerror}. Name another --log-dir.", code=2)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gaccum_ms.launch", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-n", "--processes", type=int, default=8, help="number of ranks on this host (default: 8)")
    parser.add_argument("--launcher", choices=("msrun", "mpirun"), default="msrun", help="default: msrun")
    parser.add_argument("--log-dir", type=Path, default=Path("log_output"), help="default: log_output")
    parser.add_argument("--timeout", type=float, default=0, help="seconds after which all is ended (default: never)")
    parser.add_argument(
        "--start-timeout", type=float, default=600, help="seconds to wait for ranks and hosts to come (default: 600)"
    )
    parser.add_argument("--nodes", type=int, default=1, help="number of hosts (default: 1)")
    parser.add_argument("--node-rank", type=int, default=0, help="which of them this one is, from 0")
    parser.add_argument("--master-addr", default="127.0.0.1", help="an address of host 0; needed with several hosts")
    parser.add_argument(
        "--master-port", type=int, default=0, help=f"a port there, and the next (default: {MASTER_PORT}; one host: any)"
    )
    names = ("--tune-cpu", "--tune-cpu-threads")  # the second is its name of before
    parser.add_argument(*names, dest="tune_cpu_threads", action="store_true", help="call gaccum_ms.tune_cpu() first")
    parser.add_argument("script", help="the Python program that each rank runs")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(argv)
    if options.processes < 1:
        parser.error(f"--processes must be at least 1, but got {options.processes}")
    if not Path(options.script).is_file():
        parser.error(f"no such script: {options.script}")
    if options.timeout < 0:
        parser.error(f"--timeout must be 0, for never, or more, but got {options.timeout:g}")
    if options.start_timeout <= 0:
        parser.error(f"--start-timeout must be greater than 0, but got {options.start_timeout:g}")
    if not 0 <= options.node_rank < options.nodes:
        parser.error(f"--node-rank must be from 0 to --nodes - 1 = {options.nodes - 1}, but got {options.node_rank}")
    if not 0 <= options.master_port < 65535:
        parser.error(f"--master-port must be from 1 to 65534, but got {options.master_port}")
    if options.nodes > 1:
        if options.launcher == "mpirun":
            parser.error("--nodes needs --launcher msrun")
        if options.master_addr == "127.0.0.1":
            parser.error("--nodes needs --master-addr, an address of host 0 that the other hosts can reach")
        options.master_port = options.master_port or MASTER_PORT
    return options


def main(argv: list[str] | None = None) -> int:
    """Read the command line, launch, and return the exit code."""
    options = _parse(sys.argv[1:] if argv is None else argv)
    for number in SIGNALS:
        signal.signal(number, _stop)
    log_dir = options.log_dir.resolve()
    names = [field.name for field in dataclasses.fields(Cluster)]
    cluster = Cluster(**{name: getattr(options, name) for name in names})
    begin = time.monotonic()
    try:
        launch(cluster, [options.script, *options.args], log_dir, options.timeout)
    except LaunchError as error:
        print(f"error: {error}\nlogs: {log_dir}", file=sys.stderr)
        return error.code
    print(f"{cluster.size} ranks finished in {time.monotonic() - begin:.0f} s; logs: {rank_folder(log_dir, 'N')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
