"""The processes between the launcher and a script: a keeper, a guard for each rank, and the wrapper of the script.

``guard.py --keep COMMAND ...`` , the keeper, runs msrun or mpirun. Whatever a rank starts stays below it, in other
sessions and without environment variables too: Linux gives it the processes whose parents end. If the launcher is gone,
the keeper ends all of them.

``guard.py --guard LOGS SCRIPT ...`` writes a rank's output to ``LOGS/rank.N``, reports its process id and exit code to
the launcher, in the same way under msrun and mpirun, and keeps what the rank starts as the keeper does, because the
keeper may be killed too. If the guard is killed, Linux kills the rank. It starts ``guard.py SCRIPT ...``, the wrapper,
which runs the script as Python would, and reports when the script has failed or ended: the process may end much later,
because Python waits for threads. Then the wrapper waits for the other ranks: a rank that leaves first can break the
collective that the others are still in, because its sent data are lost. While the script runs, a thread answers the
launcher, which checks whether a rank stands still after another has ended.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from types import FrameType

JOB = "GACCUM_MS_JOB"  # marks all processes of one attempt, and names the launcher's socket
NO_SCHEDULER = "GACCUM_MS_NO_SCHEDULER"  # set on all hosts but host 0
# In the commands of guards. The keeper, msrun and mpirun have these words in their commands too. All these end last.
GUARDS = f"{__file__}\0--guard\0".encode()
SCHEDULER = -1  # MindSpore's scheduler is no rank, but is guarded like one
STARTER = -2  # and so are msrun and mpirun, in the keeper's message

# How long a rank waits for the others at its end, at most. Ranks that are still in the last collective with it need
# little time. A rank that has started another collective would wait for ever, and must fail.
MEET_SECONDS = 10.0
SEND_SECONDS = 10.0  # how long a message may wait for the launcher, if it need not arrive

LET_GO, ASK = b"!", b"?"  # the launcher's messages to a rank: it may leave; report whether it stands still
IDLE_SHARE = 0.02  # of one core: a process that uses less is idle
MESSAGE_BYTES = 1 << 18  # more than Linux sends at once
LOOK_SECONDS = 0.05

# Linux's numbers, which Python lacks.
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CREDENTIALS = struct.Struct("iII")  # process, user and group


def tell(job: str, **message: object) -> None:
    """Send the launcher a message, which is lost if the launcher is gone. If it stands still, because it is stopped or
    its output is shown page by page, messages that it cannot do without wait until it takes them or dies."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to_launcher:
        to_launcher.settimeout(None if message.keys() & {"pid", "code"} else SEND_SECONDS)
        to_launcher.sendto(json.dumps(message).encode(), f"\0{job}")


def receive(messages: socket.socket, size: int = MESSAGE_BYTES) -> bytes:
    """The next message to a socket that was `bound` ; nothing, if another user has sent it, who can see the name."""
    message, control, _, _ = messages.recvmsg(size, socket.CMSG_SPACE(CREDENTIALS.size))
    senders = [CREDENTIALS.unpack(data)[1] for _, kind, data in control if kind == socket.SCM_CREDENTIALS]
    return message if senders and senders[0] in (os.getuid(), 0) else b""


def bound(name: str) -> socket.socket:
    """A socket that receives messages, with their senders. It has no file, so neither a full disk nor a long path can
    stop a message."""
    messages = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    messages.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    messages.bind(f"\0{name}")
    return messages


# -- the keeper and the guards -----------------------------------------------------------------------------------------


def keep(command: list[str]) -> int:
    """Run msrun or mpirun, report its exit code, and stay until the launcher is gone; then end all that is below."""
    if child := os.fork():  # if Ray ends the launcher, it kills the launcher's children, but not theirs
        return as_in_shells(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    adopt_orphans()
    job, role = os.environ[JOB], os.environ.get("MS_ROLE")
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    code = _wait(process, lambda: bool(select.select([0], [], [], 0)[0]), job)  # the launcher never writes
    tell(job, rank=SCHEDULER if role == "MS_SCHED" else STARTER, code=code)
    os.read(0, 1)
    end_all(job)
    return 0


def guard(logs: Path, command: list[str]) -> int:
    """Run a rank, or the scheduler, and return its exit code."""
    env = dict(os.environ)
    job, is_scheduler = env[JOB], env.get("MS_ROLE") == "MS_SCHED"
    if is_scheduler and NO_SCHEDULER in env:
        return 0  # msrun starts one wherever the address is local, as where two hosts share a machine
    rank = str(SCHEDULER) if is_scheduler else env.get("OMPI_COMM_WORLD_RANK") or env["RANK_ID"]
    tell(job, rank=int(rank), guard=os.getpid())
    if "OMPI_COMM_WORLD_RANK" in env:  # replaced by MindSpore's variables; Open MPI's would mislead it
        env = {k: v for k, v in env.items() if not k.startswith(("OMPI_", "PMIX_"))}
        env |= {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": rank, "RANK_ID": rank, "DEVICE_ID": rank}
    adopt_orphans()
    parent = os.getpid()

    def end_with_the_guard() -> None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has just been killed
            os._exit(1)

    code = 1
    try:
        with contextlib.ExitStack() as stack:
            files = [] if is_scheduler else [logs / f"rank.{rank}" / name for name in ("stdout", "stderr")]
            stdout, stderr = [stack.enter_context(file.open("wb")) for file in files] or (None, None)
            command = [sys.executable, __file__, *command]
            process = subprocess.Popen(command, env=env, stdout=stdout, stderr=stderr, preexec_fn=end_with_the_guard)
            if not is_scheduler:
                tell(job, rank=int(rank), pid=process.pid)
            code = _wait(process, lambda: not _listens(job), job, guards=False)
    finally:  # also if a log cannot be opened, because its folder was removed meanwhile
        tell(job, rank=int(rank), code=code)
    return code


def as_in_shells(code: int) -> int:
    """An exit code of Python's `subprocess` as shells have it: 128 + signal, if a signal ended the process."""
    return code if code >= 0 else 128 - code


def _listens(job: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to_launcher:
        return to_launcher.connect_ex(f"\0{job}") == 0


def _wait(process: subprocess.Popen, launcher_is_gone: Callable[[], bool], job: str, guards: bool = True) -> int:
    """Wait until a process ends, and return its exit code. If the launcher was killed, which could not end the
    processes then, end them."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)  # also what others have left to this process
        if pid == process.pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return as_in_shells(process.returncode)
        if not pid:
            if launcher_is_gone():
                end_all(job, guards=guards)
            time.sleep(LOOK_SECONDS)


# -- a launch's processes ----------------------------------------------------------------------------------------------


def _prctl(option: int, value: int) -> None:
    LIBC.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def adopt_orphans() -> None:
    """Become the parent of processes below this one whose parents end. Otherwise they leave the tree."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def children() -> set[int]:
    """The children of this process."""
    return {pid for pid, parent in _parents().items() if parent == os.getpid()}


def _parents() -> dict[int, int]:
    """The parent of each process that has not ended. One with threads that have not ended has not either: they may
    still use a device."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            state, parent, *others = (path / "stat").read_bytes().rpartition(b")")[2].split()
            if state not in (b"Z", b"X") or int(others[15]) > 1:
                parents[int(path.name)] = int(parent)
    return parents


def end_all(
    job: str,
    grace_seconds: float = 0.0,
    guards: bool = True,
    roots: Callable[[], set[int]] = lambda: {os.getpid()},
) -> set[int]:
    """End the processes of a launch: those in the trees of `roots` , but not this one, and those that have the launch's
    environment variable. They get SIGTERM, and SIGKILL `grace_seconds` later, until none is left.

    Guards, keepers, msrun and mpirun come last, if at all: if this process is killed meanwhile, they end the rest. For
    that they must be in a tree of `roots` : another keeper still has its own work. Return the processes of other users,
    which this one may not end.
    """
    kill_from, mark = time.monotonic() + grace_seconds, f"{JOB}={job}".encode()
    looks, others = 0, {os.getpid()}
    while looks < 2:  # a look can miss a process whose parent ends meanwhile
        parents, ours = _parents(), roots()
        while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
            ours |= more
        left: dict[bool, list[int]] = {True: [], False: []}  # by whether they are guards
        for pid in parents.keys() - others:
            is_guard = GUARDS in _read(pid, "cmdline")
            if pid in ours or (not is_guard and mark in _read(pid, "environ").split(b"\0")):
                left[is_guard].append(pid)
        to_end = left[False] or (left[True] if guards else [])
        for pid in to_end:
            with contextlib.suppress(ProcessLookupError):
                try:
                    os.kill(pid, signal.SIGTERM if time.monotonic() < kill_from else signal.SIGKILL)
                except PermissionError:
                    others.add(pid)
        looks = 0 if to_end else looks + 1
        time.sleep(0.1 if to_end else 0)
    return others - {os.getpid()}


def _read(pid: int, name: str) -> bytes:
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


# -- the rank ----------------------------------------------------------------------------------------------------------


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
        code, by_argparse = 0, False
    except KeyboardInterrupt:
        if launcher is not None:
            launcher.failed(130)
        raise  # Python ends such a process by a signal
    except BaseException as error:
        code, by_argparse = _show(error), _is_of_argparse(error)
    if launcher is not None:
        launcher.failed(code, by_argparse) if code else launcher.wait_for_others()
    if code:
        sys.exit(code)


def _show(error: BaseException) -> int:
    """Print an exception that ends a script as Python does, and return the exit code."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            code = error.code or 0
            return code & 0xFF if -(2**63) <= code < 2**63 else 0xFF  # what is no `long` is -1 to Python
        print(error.code, file=sys.stderr, flush=True)
        return 1
    traceback = error.__traceback__ and error.__traceback__.tb_next  # without our own line, which is first
    sys.excepthook(type(error), error.with_traceback(traceback), traceback)
    return 1


def _is_of_argparse(error: BaseException) -> bool:
    """Whether argparse has ended the script."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and place.tb_frame.f_globals.get("__name__") == "argparse"


class _Launcher:
    """A rank's connection to the launcher."""

    def __init__(self, job: str, rank: int) -> None:
        self._job, self._rank = job, rank
        self._let_go = threading.Event()
        self._frame: FrameType | None = None
        self._place = 0
        self._since = self._asked = self._busy = 0.0
        with contextlib.suppress(OSError):
            self._socket = bound(f"{job}-{rank}")
            threading.Thread(target=self._answer, name="gaccum_ms", daemon=True).start()

    def failed(self, code: int, by_argparse: bool = False) -> None:
        """Report that the script has failed; threads and exit handlers may keep the process running."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the script may have closed it
                stream.flush()
        tell(self._job, rank=self._rank, fails=code, argparse=by_argparse)

    def wait_for_others(self) -> None:
        """Report that the script has ended, and wait until the others have ended too."""
        tell(self._job, rank=self._rank, at_end=True)
        self._let_go.wait(MEET_SECONDS)

    def _answer(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                word = receive(self._socket, 1)
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
    if sys.argv[1] in ("--keep", "--guard"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it was ignored, as it may be, exit codes are lost
    if sys.argv[1] == "--keep":
        sys.exit(keep(sys.argv[2:]))
    elif sys.argv[1] == "--guard":
        sys.exit(guard(Path(sys.argv[2]), sys.argv[3:]))
    else:
        run(sys.argv[1], sys.argv[2:])
