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
import errno
import fcntl
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
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
from gaccum_ms.cluster import JOB, MASTER_PORT, SECRET, Cluster, LaunchError, held_port, left_out
from gaccum_ms.command_line import Parser, seconds
from gaccum_ms.nodes import SECRET_BYTES, Link, Message, link
from gaccum_ms.ranks import Ranks, Reports, last_lines, rank_folder, rank_logs

POLL_SECONDS = 0.2
LOOK_SECONDS = 1.0
PROBE_BYTES = 65536
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FOLDERS = ("1", "msrun", "mpirun", ".cuda")  # in the log folder; each launch makes its own anew
MARK = ".made-by-gaccum_ms"  # a file in what a launch has made: a folder without it is somebody's, and stays


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
                if tail.unread:  # `| head` has seen enough
                    end["error"] = f"nobody reads the output of host {self._cluster.node_rank}."
                    raise SystemExit(128 + signal.SIGPIPE)
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
        cuda = gpu.environment(self._log_dir / ".cuda", env)
        if cuda:
            _mark(self._log_dir / ".cuda")
        env |= cuda
        prefix = self._cluster.command(self._log_dir, env)
        # -I: modules of the user's folders are not for the guard
        guard = ["-I", rank.__file__, "--guard", str(self._log_dir), *command]
        logs = self._log_dir / self._cluster.launcher
        if self._cluster.launcher == "mpirun":
            scheduler = [sys.executable, *guard]
            _spawn(scheduler, logs / "scheduler.log", env | {"MS_ROLE": "MS_SCHED"})
        return _spawn([*prefix, *guard], logs / f"{self._cluster.launcher}.log", env)

    def _news(self, process: subprocess.Popen, timeout: float) -> list[Message]:
        """What has happened on this host, after waiting a moment for something to happen."""
        ended = process.poll() is not None  # asked first: what its guards said before is then there to be read
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
                message["log"] = rank_logs(self._log_dir, number)
        if ended and (silent := self._ranks.silent(news)):
            what = f"{self._cluster.launcher} ended with exit code {process.returncode}; ranks {silent} never finished"
            log = last_lines(self._log_dir / self._cluster.launcher / f"{self._cluster.launcher}.log")
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
    """Copies what is added to a file to this program's standard output, until nobody reads that."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self.unread = False

    def copy(self) -> None:
        """Copy what was added since the last call."""
        if self._file is None and self._path.exists():
            self._file = self._path.open("rb")
        if self._file is not None and not self.unread:
            self.unread = not show(self._file.read())


def show(data: bytes) -> bool:
    """Write to standard output; tell whether somebody reads it."""
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    except BrokenPipeError:
        with Path(os.devnull).open("wb") as nowhere:  # for what is left in the buffer when this program ends
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return False
    return True


@contextlib.contextmanager
def _locked(log_dir: Path) -> Iterator[None]:
    """Make the log folder and keep other launches out of it."""
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        lock = (log_dir / ".lock").open("a")
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
    old = [log_dir / name for name in FOLDERS if os.path.lexists(log_dir / name)]
    for folder in old:
        if not _made_by_a_launch(folder):
            why = f"'{folder}' was not made by a launch, and would have to be replaced"
            raise LaunchError(f"{why}. Name another --log-dir, or move it away.", code=2)
    try:
        for folder in old:
            shutil.rmtree(folder)
        for folder in (log_dir / cluster.launcher, *(rank_folder(log_dir, number) for number in cluster.local_ranks)):
            folder.mkdir(parents=True)
            _mark(folder)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise _unwritable(log_dir, error) from error
    if full := _why_full(log_dir):
        raise LaunchError(full, 2)


def _made_by_a_launch(path: Path) -> bool:
    """Tell whether a folder is marked, or has nothing in it but such folders."""
    if path.is_symlink() or not path.is_dir():
        return False
    return (path / MARK).is_file() or all(_made_by_a_launch(entry) for entry in path.iterdir())


def _mark(folder: Path) -> None:
    (folder / MARK).write_text("The next launch with the same --log-dir replaces this folder.\n")


def _why_full(log_dir: Path) -> str:
    """Why the log folder takes no more data, or nothing. Ranks that cannot write fail, and cannot write why."""
    try:
        with tempfile.TemporaryFile(dir=log_dir, buffering=0) as probe:
            left = PROBE_BYTES
            while left:
                left -= probe.write(bytes(left))
    except OSError as error:
        return f"'{log_dir}' takes no more logs: {error.strerror}. Make room there, or name another --log-dir."
    return ""


def _unwritable(log_dir: Path, error: OSError) -> LaunchError:
    return LaunchError(f"cannot write logs to '{log_dir}': {error.strerror}. Name another --log-dir.", code=2)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m gaccum_ms.launch",
        usage="%(prog)s [options] script [its arguments]",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("-n", "--processes", type=int, default=8, help="number of ranks on this host (default: 8)")
    parser.add_argument("--script", help="the program that each rank runs, where it does not come after the options")
    parser.add_argument("--launcher", choices=("msrun", "mpirun"), default="msrun", help="default: msrun")
    parser.add_argument("--log-dir", type=Path, default=Path("log_output"), help="default: log_output")
    parser.add_argument("--timeout", type=seconds, default=0, help="seconds after which all is ended (default: never)")
    parser.add_argument(
        "--start-timeout", type=seconds, default=600, help="seconds in which ranks and hosts must come (default: 600)"
    )
    parser.add_argument(
        "--end-timeout",
        type=seconds,
        default=15,
        help="seconds for which ranks may stand still once another has ended (default: 15; 0: for ever)",
    )
    parser.add_argument("--nodes", type=int, default=1, help="number of hosts (default: 1)")
    parser.add_argument("--node-rank", type=int, default=0, help="which of them this one is, from 0")
    parser.add_argument("--master-addr", default="127.0.0.1", help="an address of host 0; needed with several hosts")
    parser.add_argument(
        "--master-port", type=int, default=0, help=f"a port there, and the next (default: {MASTER_PORT}; one host: any)"
    )
    parser.add_argument(
        "--secret-file", type=Path, help=f"what hosts know each other by, in a file (default: the variable {SECRET})"
    )
    names = ("--tune-cpu", "--tune-cpu-threads")  # the second is its name of before
    parser.add_argument(*names, dest="tune_cpu_threads", action="store_true", help="call gaccum_ms.tune_cpu() first")
    parser.add_argument("--rank-table-file", "--rank_table_file", default="", help="msrun's option")
    parser.add_argument("--bind-core", "--bind_core", default="", help="msrun's option: True, or cores as JSON")
    # What run.sh needs: the script where none is given, and which one it is.
    parser.add_argument("--default-script", help=argparse.SUPPRESS)
    parser.add_argument("--print-script", action="store_true", help=argparse.SUPPRESS)
    own, rest = parser.split(argv)
    options = parser.parse_args(own)
    if options.script is None:
        if rest and not rest[0].startswith("-"):
            options.script = rest.pop(0)
        elif options.default_script is not None:
            options.script = options.default_script
        else:
            parser.error(f"there is no option {rest[0]}" if rest else "the script is missing")
    options.args = rest
    if options.processes < 1:
        parser.error(f"--processes must be at least 1, but got {options.processes}")
    if not Path(options.script).is_file():
        parser.error(f"no such script: {options.script}")
    if options.start_timeout == 0:
        parser.error("--start-timeout must be greater than 0, but got 0")
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
    for name, value in (("--rank-table-file", options.rank_table_file), ("--bind-core", options.bind_core)):
        if value and options.launcher == "mpirun":
            parser.error(f"{name} needs --launcher msrun")
    if options.rank_table_file:
        if not Path(options.rank_table_file).is_file():
            parser.error(f"--rank-table-file: no such file: {options.rank_table_file}")
        options.rank_table_file = str(Path(options.rank_table_file).resolve())
    if options.bind_core and options.bind_core.lower() not in ("true", "false") and not _is_object(options.bind_core):
        parser.error(f"--bind-core must be True, False or a JSON object, but got {options.bind_core}")
    try:
        options.secret = _secret(options.secret_file)
    except ValueError as error:
        parser.error(str(error))
    return options


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _secret(file: Path | None) -> bytes:
    """What the hosts know each other by; nothing where there is none."""
    if file is None:
        name, secret = SECRET, os.environ.get(SECRET, "").strip().encode()
        if not secret:
            return b""
    else:
        name = "--secret-file"
        try:
            secret = file.read_bytes().strip()
        except OSError as error:
            raise ValueError(f"--secret-file: cannot read '{file}': {error.strerror}") from None
    if len(secret) < SECRET_BYTES:
        raise ValueError(f"{name} must hold at least {SECRET_BYTES} characters, but got {len(secret)}")
    return secret


def main(argv: list[str] | None = None) -> int:
    """Read the command line, launch, and return the exit code."""
    options = _parse(sys.argv[1:] if argv is None else argv)
    if options.print_script:
        show(f"{options.script}\n".encode())
        return 0
    if importlib.util.find_spec("psutil") is None:
        print("error: 'psutil' is not installed (pip install psutil).", file=sys.stderr)
        return 2
    for number in SIGNALS:
        signal.signal(number, _stop)
    log_dir = options.log_dir.resolve()
    names = [field.name for field in dataclasses.fields(Cluster)]
    cluster = Cluster(**{name: getattr(options, name) for name in names})
    notes = left_out(os.environ)
    if cluster.nodes > 1 and cluster.node_rank == 0 and not cluster.secret:
        who = f"whoever can reach {cluster.master_addr}, port {cluster.master_port + 1}, can end this launch"
        notes.append(f"without {SECRET} or --secret-file {who}")
    show("".join(f"note: {note}\n" for note in notes).encode())
    begin = time.monotonic()
    try:
        launch(cluster, [options.script, *options.args], log_dir, options.timeout)
    except LaunchError as error:
        print(f"error: {error}\nlogs: {log_dir}", file=sys.stderr)
        return error.code
    seconds_taken = time.monotonic() - begin
    show(f"{cluster.size} ranks finished in {seconds_taken:.0f} s; logs: {rank_folder(log_dir, 'N')}\n".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
