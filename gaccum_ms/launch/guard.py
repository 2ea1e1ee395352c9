"""A guard process for each rank, and the wrapper that runs the script in the rank's own process.

``guard.py --guard LOGS SCRIPT ...`` writes a rank's output to ``LOGS/rank.N``, reports its process id and exit code to
the launcher, in the same way under msrun and mpirun, and kills it if the launcher is gone. It starts ``guard.py SCRIPT
...``, the wrapper, which runs the script as Python would, and reports when the script has failed or ended: the process
may end much later, because Python waits for threads. Then the wrapper waits for the other ranks: a rank that leaves
first can break the collective that the others are still in, because its sent data are lost. While the script runs, a
thread answers the launcher, which checks whether a rank stands still after another has ended.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from types import FrameType

JOB = "GACCUM_MS_JOB"  # marks all processes of one attempt, and names the launcher's socket
NO_SCHEDULER = "GACCUM_MS_NO_SCHEDULER"  # set on all hosts but host 0
# In the commands of guards, which all do the same when the launcher is gone, and then end. msrun and mpirun have these
# words in their commands too, and end after the guards.
GUARDS = f"{__file__}\0--guard\0".encode()
SCHEDULER = -1  # MindSpore's scheduler is no rank, but is guarded like one

# How long a rank waits for the others at its end, at most. Ranks that are still in the last collective with it need
# little time. A rank that has started another collective would wait for ever, and must fail.
MEET_SECONDS = 10.0
SEND_SECONDS = 10.0  # how long a message may wait for the launcher, if it need not arrive

LET_GO, ASK = b"!", b"?"  # the launcher's messages to a rank: it may leave; report whether it stands still
IDLE_SHARE = 0.02  # of one core: a process that uses less is idle


def tell(job: str, **message: object) -> None:
    """Send the launcher a message, which is lost if the launcher is gone. If it stands still, because it is stopped or
    its output is shown page by page, messages that it cannot do without wait until it takes them or dies."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to_launcher:
        to_launcher.settimeout(None if message.keys() & {"pid", "code"} else SEND_SECONDS)
        to_launcher.sendto(json.dumps(message).encode(), f"\0{job}")


def guard(logs: Path, command: list[str]) -> int:
    """Run a rank, or the scheduler, and return its exit code: 128 + signal if a signal ended it, as in shells."""
    env = dict(os.environ)
    job = env[JOB]
    command = [sys.executable, __file__, *command]
    if env.get("MS_ROLE") == "MS_SCHED":
        if NO_SCHEDULER in env:  # msrun starts one wherever the address is local, as where two hosts share a machine
            return 0
        code = _wait(subprocess.Popen(command, env=env), job)
        tell(job, rank=SCHEDULER, code=code)
        return code
    rank = env.get("OMPI_COMM_WORLD_RANK") or env["RANK_ID"]
    if "OMPI_COMM_WORLD_RANK" in env:  # replaced by MindSpore's variables; Open MPI's would mislead it
        env = {k: v for k, v in env.items() if not k.startswith(("OMPI_", "PMIX_"))}
        env |= {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": rank, "RANK_ID": rank, "DEVICE_ID": rank}
    folder = logs / f"rank.{rank}"
    with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        process = subprocess.Popen(command, env=env, stdout=stdout, stderr=stderr)
        tell(job, rank=int(rank), pid=process.pid)
        code = _wait(process, job)
    tell(job, rank=int(rank), code=code)
    return code


def _wait(process: subprocess.Popen, job: str) -> int:
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to_launcher:
            if to_launcher.connect_ex(f"\0{job}"):  # it was killed, and could not end the processes
                end_all(job, guards=False)
        code = process.returncode
        if code is not None:
            return code if code >= 0 else 128 - code


def end_all(job: str, grace_seconds: float = 0.0, guards: bool = True) -> None:
    """End every process of a launch, in other sessions too: SIGTERM, `grace_seconds` later SIGKILL, until none is left.
    Guards, msrun and mpirun come last, if at all: if this process is killed meanwhile, the guards end the rest."""
    kill_from, mark = time.monotonic() + grace_seconds, f"{JOB}={job}".encode()
    while True:
        left: dict[bool, list[int]] = {True: [], False: []}  # by whether they are guards
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    left[GUARDS in (process / "cmdline").read_bytes()].append(int(process.name))
        ended = left[False] or (left[True] if guards else [])
        if not ended:
            return
        for pid in ended:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM if time.monotonic() < kill_from else signal.SIGKILL)
        time.sleep(0.1)


def run(script: str, arguments: list[str]) -> None:
    """Run a script as ``python script`` does; if it ends well, wait for the other ranks."""
    job, role, rank = (os.environ.get(name, "") for name in (JOB, "MS_ROLE", "RANK_ID"))
    launcher = None if role == "MS_SCHED" else _Launcher(job, int(rank))
    path = Path(script).absolute()
    main = types.ModuleType("__main__")
    vars(main).update(__file__=str(path), __builtins__=builtins)
    sys.modules["__main__"] = main
    sys.argv = [script, *arguments]
    if not getattr(sys.flags, "safe_path", False):  # with this flag, Python does not add the script's folder
        sys.path[0] = str(path.resolve().parent)
    try:
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(main))
        code = 0
    except KeyboardInterrupt:
        if launcher is not None:
            launcher.failed(130)
        raise  # Python ends such a process by a signal
    except BaseException as error:
        code = _show(error)
    if launcher is not None:
        launcher.failed(code) if code else launcher.wait_for_others()
    if code:
        sys.exit(code)


def _show(error: BaseException) -> int:
    """Print an exception that ends a script as Python does, and return the exit code."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr, flush=True)
        return 1
    traceback = error.__traceback__ and error.__traceback__.tb_next  # without our own line, which is first
    sys.excepthook(type(error), error.with_traceback(traceback), traceback)
    return 1


class _Launcher:
    """A rank's connection to the launcher."""

    def __init__(self, job: str, rank: int) -> None:
        self._job, self._rank = job, rank
        self._let_go = threading.Event()
        self._frame: FrameType | None = None
        self._place = 0
        self._since = self._asked = self._busy = 0.0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with contextlib.suppress(OSError):
            self._socket.bind(f"\0{job}-{rank}")
            threading.Thread(target=self._answer, name="gaccum_ms", daemon=True).start()

    def failed(self, code: int) -> None:
        """Report that the script has failed; threads and exit handlers may keep the process running."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the script may have closed it
                stream.flush()
        tell(self._job, rank=self._rank, fails=code)

    def wait_for_others(self) -> None:
        """Report that the script has ended, and wait until the others have ended too."""
        tell(self._job, rank=self._rank, at_end=True)
        self._let_go.wait(MEET_SECONDS)

    def _answer(self) -> None:
        with contextlib.suppress(OSError):
            while word := self._socket.recv(1):
                if word == LET_GO:
                    self._let_go.set()
                elif word == ASK:
                    seconds, place = self._stands_still()
                    tell(self._job, rank=self._rank, still=seconds, place=place)

    def _stands_still(self) -> tuple[float, str]:
        """For how many seconds the main thread has stood still, since the launcher's first question, and where.

        In MindSpore, except its compiler, the thread stands still if it stays in the same call, even if it computes:
        CPU ranks wait for each other in busy loops. Elsewhere, the process must also be idle and have no child.
        """
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        now, busy = time.monotonic(), time.process_time()
        moved = frame is None or frame is not self._frame or frame.f_lasti != self._place
        if frame is not None and not (_in_mindspore(frame) and "compile" not in frame.f_code.co_name):
            moved = moved or busy - self._busy > IDLE_SHARE * (now - self._asked) or _has_children()
        if moved:
            self._since = now
        # The frame itself is kept, not its address, which another call may reuse.
        self._frame, self._place, self._asked, self._busy = frame, frame.f_lasti if frame else 0, now, busy
        while frame is not None and frame.f_back is not None and _in_mindspore(frame):
            frame = frame.f_back
        return now - self._since, f"{frame.f_code.co_filename}, line {frame.f_lineno}" if frame else ""


def _in_mindspore(frame: FrameType) -> bool:
    """Whether code of MindSpore runs, except its datasets, which wait for files and child processes."""
    home = os.path.dirname(getattr(sys.modules.get("mindspore"), "__file__", None) or "")
    file = frame.f_code.co_filename
    return bool(home) and file.startswith(home + os.sep) and not file.startswith(os.path.join(home, "dataset", ""))


def _has_children() -> bool:
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # that thread has ended
            if path.read_text().strip():
                return True
    return False


if __name__ == "__main__":
    if sys.argv[1] == "--guard":
        sys.exit(guard(Path(sys.argv[2]), sys.argv[3:]))
    run(sys.argv[1], sys.argv[2:])
