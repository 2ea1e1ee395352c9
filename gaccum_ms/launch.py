"""Start a script on several processes of this machine, and end them together.

    python -m gaccum_ms.launch --processes 8 train.py --epochs 3

starts one tree of processes::

    this program ── msrun or mpirun ── one guard per rank (`_guard`, below) ── the script

A guard keeps its rank's output in ``log_output/1/rank.N/stdout`` and ``stderr``, and its exit code in ``exit_code``
beside them, so this program learns which rank failed first in the same way from either launcher. Every process that it
starts carries one variable of its environment, by which all of them are found and ended: ending msrun alone leaves its
workers running.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import IO

JOB = "GACCUM_MS_JOB"  # "<pid of the launcher>-<random>": marks all processes of one launch
POLL_SECONDS = 0.2
TAIL_LINES = 20

# What a batch system, an outer msrun or an outer mpirun leaves behind. MindSpore believes these before anything else.
CLUSTER_PREFIXES = ("RANK_", "MS_SCHED_", "OMPI_", "PMIX_", "PMI_", "PRTE_")
CLUSTER_NAMES = {"MS_ROLE", "MS_WORKER_NUM", "MS_NODE_ID", "MS_NODE_RANK", "MS_TOPO_TIMEOUT", "MS_SIMULATION_LEVEL"}
CLUSTER_NAMES |= {"DEVICE_ID", "DEVICE_NUM", "MSRUN_CPU_LIST", "MSRUN_BIND_FILE", JOB}
THREAD_NAMES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class LaunchError(Exception):
    """A launch that cannot start or did not succeed, with the exit code of this program."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def free_port() -> int:
    """Return a TCP port that nothing on this machine listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def child_environment(parent: Mapping[str, str], processes: int, cores: int) -> dict[str, str]:
    """Return the environment of the processes to start.

    Args:
        parent (Mapping[str, str]): The environment of this program.
        processes (int): The number of processes that share the machine.
        cores (int): The number of cores they share.

    Returns:
        dict[str, str], `parent` without another cluster's variables, with as many threads for each process as it has
        cores (at least 1; numbers that `parent` sets are kept), and with this Python's folder first in ``PATH``.
    """
    env = {k: v for k, v in parent.items() if k not in CLUSTER_NAMES and not k.startswith(CLUSTER_PREFIXES)}
    for name in THREAD_NAMES:
        env.setdefault(name, str(max(1, cores // processes)))
    env.setdefault("PYTHONUNBUFFERED", "1")
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    return env


def launcher_command(launcher: str, processes: int, port: int, log_dir: Path, env: Mapping[str, str]) -> list[str]:
    """Return the command, without the program to start, that starts it `processes` times.

    Raises:
        LaunchError: If `launcher` is not installed.
    """
    path = shutil.which(launcher, path=env["PATH"])
    if path is None:
        remedy = "on Debian: apt-get install openmpi-bin" if launcher == "mpirun" else "pip install mindspore"
        raise LaunchError(f"'{launcher}' is not installed ({remedy}).", code=2)
    if launcher == "msrun":
        own_logs = log_dir / "msrun"
        own_logs.mkdir(exist_ok=True)
        count = [f"--worker_num={processes}", f"--local_worker_num={processes}"]
        address = ["--master_addr=127.0.0.1", f"--master_port={port}"]
        return [path, *count, *address, f"--log_dir={own_logs}", "--join=True", "--tail_worker_log=0", "python3"]
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [path, "-n", str(processes), "--oversubscribe", "--bind-to", "none", *as_root, sys.executable]


def start(launcher: str, processes: int, command: list[str], log_dir: Path, env: dict[str, str]) -> subprocess.Popen:
    """Start `command` on all ranks (and MindSpore's scheduler, where the launcher does not) and return the launcher."""
    port = free_port()
    prefix = launcher_command(launcher, processes, port, log_dir, env)
    guard = ["-I", __file__, "--guard", str(log_dir), *command]  # -I: modules of the script's folder are not for it
    if launcher == "mpirun":  # it knows nothing of MindSpore's cluster, whose variables and scheduler come from here
        env |= {"MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(port)}
        env |= {"MS_WORKER_NUM": str(processes), "RANK_SIZE": str(processes)}
        _spawn([sys.executable, *guard], log_dir / "scheduler.log", env | {"MS_ROLE": "MS_SCHED"})
    return _spawn([*prefix, *guard], log_dir / f"{launcher}.log", env)


def _spawn(command: list[str], log: Path, env: dict[str, str]) -> subprocess.Popen:
    with log.open("wb") as output:
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def first_failure(log_dir: Path) -> tuple[int, int] | None:
    """Return rank and exit code of the rank that failed first, or None. The others mostly fail because of it."""
    failures = []
    for path in rank_folder(log_dir, "*").parent.glob("rank.*/exit_code"):
        code = int(path.read_text())
        if code != 0:
            failures.append((path.stat().st_mtime_ns, int(path.parent.name.removeprefix("rank.")), code))
    return min(failures)[1:] if failures else None


def rank_folder(log_dir: Path, rank: int | str) -> Path:
    """Return the folder with one rank's ``stdout``, ``stderr`` and ``exit_code``."""
    return log_dir / "1" / f"rank.{rank}"


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


def last_lines(path: Path, count: int = TAIL_LINES) -> str:
    """Return the end of a log, indented, under its path; nothing where it is empty."""
    lines = path.read_text(errors="replace").splitlines()[-count:] if path.exists() else []
    return "\n".join(["", f"the end of {path}:", *(f"    {line}" for line in lines)]) if lines else ""


def launch(launcher: str, processes: int, command: list[str], log_dir: Path, timeout: float = 0) -> None:
    """Run `command` on every rank until all have ended, showing rank 0's output meanwhile.

    Args:
        launcher (str): ``"msrun"`` or ``"mpirun"``.
        processes (int): The number of ranks.
        command (list[str]): The program of each rank and its arguments.
        log_dir (Path): Where the logs go. One launch at a time can use it.
        timeout (float): Seconds after which all ranks are ended. 0: never.

    Raises:
        LaunchError: If the launch cannot start, a rank fails, or time runs out; no process is left then.
    """
    with _locked(log_dir):
        for name in ("1", "msrun"):
            shutil.rmtree(log_dir / name, ignore_errors=True)  # an older launch's ranks would be taken for ours
        job = f"{os.getpid()}-{uuid.uuid4().hex}"
        env = child_environment(os.environ, processes, len(os.sched_getaffinity(0))) | {JOB: job}
        begin = time.monotonic()
        tail = Tail(rank_folder(log_dir, 0) / "stdout")
        failure, late = None, False
        try:
            process = start(launcher, processes, command, log_dir, env)
            while process.poll() is None and not failure and not late:
                time.sleep(POLL_SECONDS)
                tail.copy()
                failure = first_failure(log_dir)
                late = bool(timeout) and time.monotonic() - begin > timeout
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)  # a second Ctrl+C must not leave processes behind
            end_all(job)
            tail.copy()
        _report(launcher, processes, log_dir, failure or first_failure(log_dir), late and timeout, process.returncode)


def _report(
    launcher: str, processes: int, log_dir: Path, failure: tuple[int, int] | None, late: float, code: int
) -> None:
    """Raise the error that says what went wrong, if anything did."""
    if failure:
        rank, rank_code = failure
        folder = rank_folder(log_dir, rank)
        logs = last_lines(folder / "stdout") + last_lines(folder / "stderr")
        raise LaunchError(f"rank {rank} failed with exit code {rank_code}; all ranks were ended.{logs}")
    if late:
        running = [rank for rank in range(processes) if not (rank_folder(log_dir, rank) / "exit_code").exists()]
        raise LaunchError(f"time ran out: ranks {running} had not ended after {late:g} s; all were ended.", code=124)
    missing = [rank for rank in range(processes) if not (rank_folder(log_dir, rank) / "exit_code").exists()]
    if code or missing:
        what = f"{launcher} ended with exit code {code}" + (f"; ranks {missing} never finished" if missing else "")
        raise LaunchError(what + last_lines(log_dir / f"{launcher}.log"))


@contextlib.contextmanager
def _locked(log_dir: Path) -> Iterator[None]:
    """Make the log folder and keep other launches out of it."""
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        lock = (log_dir / ".lock").open("w")
    except OSError as error:
        raise LaunchError(f"cannot write logs to '{log_dir}': {error.strerror}. Name another --log-dir.", 2) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LaunchError(f"another launch writes to '{log_dir}'. Name another --log-dir.", 2) from None
        yield


def _guard(log_dir: Path, command: list[str]) -> int:
    """Run one rank (or the scheduler): keep its output and exit code, and end it when the launcher is gone."""
    env = dict(os.environ)
    if env.get("MS_ROLE") == "MS_SCHED":
        return _wait(subprocess.Popen(command, env=env))
    rank = env.get("OMPI_COMM_WORLD_RANK") or env["RANK_ID"]
    if "OMPI_COMM_WORLD_RANK" in env:  # from here on MindSpore's variables say it all; Open MPI's would mislead it
        env = {k: v for k, v in env.items() if not k.startswith(("OMPI_", "PMIX_"))}
        env |= {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": rank, "RANK_ID": rank, "DEVICE_ID": rank}
    folder = rank_folder(log_dir, rank)
    folder.mkdir(parents=True)
    with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        code = _wait(subprocess.Popen(command, env=env, stdout=stdout, stderr=stderr))
    unfinished = folder / ".exit_code"
    unfinished.write_text(str(code))
    unfinished.rename(folder / "exit_code")  # whole or not there
    return code


def _wait(process: subprocess.Popen) -> int:
    """Wait for a process; return its exit code, 128 + signal where a signal ended it, as shells do."""
    launcher = Path(f"/proc/{os.environ[JOB].split('-')[0]}/stat")
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=1)
            return code if code >= 0 else 128 - code
        if not _alive(launcher):  # killed, with no chance to end us
            process.kill()


def _alive(stat: Path) -> bool:
    """Tell whether the process of this ``/proc`` entry runs: it is there, and no zombie that nobody has collected."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(argv: list[str] | None = None) -> int:
    """Read the command line, launch, and return the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--guard"]:
        return _guard(Path(argv[1]), argv[2:])

    parser = argparse.ArgumentParser(prog="python -m gaccum_ms.launch", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-n", "--processes", type=int, default=8, help="number of ranks (default: 8)")
    parser.add_argument("--launcher", choices=("msrun", "mpirun"), default="msrun", help="default: msrun")
    parser.add_argument("--log-dir", type=Path, default=Path("log_output"), help="default: log_output")
    parser.add_argument("--timeout", type=float, default=0, help="seconds after which all is ended (default: never)")
    parser.add_argument("script", help="the Python program that each rank runs")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(argv)
    if options.processes < 1:
        parser.error(f"--processes must be at least 1, but got {options.processes}")
    if not Path(options.script).is_file():
        parser.error(f"no such script: {options.script}")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    log_dir = options.log_dir.resolve()
    begin = time.monotonic()
    try:
        command = [sys.executable, options.script, *options.args]
        launch(options.launcher, options.processes, command, log_dir, options.timeout)
    except LaunchError as error:
        print(f"error: {error}\nlogs: {log_dir}", file=sys.stderr)
        return error.code
    print(f"{options.processes} ranks finished in {time.monotonic() - begin:.0f} s; logs: {rank_folder(log_dir, 'N')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
