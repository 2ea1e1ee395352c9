"""The processes between the launcher and a script: a keeper, a guard for each rank, and the wrapper of the script.

``guard.py --keep COMMAND ...`` , the keeper, runs msrun or mpirun. Whatever a rank starts stays below it, in other
sessions and without environment variables too: Linux gives it the processes whose parents end. If the launcher is gone,
the keeper ends all of them.

``guard.py --guard LOGS SCRIPT ...`` writes a rank's output to ``LOGS/rank.N``, reports its process id and exit code to
the launcher, in the same way under msrun and mpirun, and keeps what the rank starts as the keeper does, because the
keeper may be killed too. If the guard is killed, Linux kills the rank. It starts ``guard.py SCRIPT ...``, the wrapper,
which runs the script as Python would, and reports when the script has failed or ended: the process may end much later,
because Python waits for threads. Then the wrapper waits for the other ranks: a rank that leaves first can break the
collective that the others are still in, because its sent data are lost.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import types
from collections.abc import Collection
from pathlib import Path

JOB = "GACCUM_MS_JOB"  # marks all processes of one attempt, and names the launcher's socket
NO_SCHEDULER = "GACCUM_MS_NO_SCHEDULER"  # set on all hosts but host 0
# In the commands of guards. The keeper, msrun and mpirun have these words in their commands too. All these end last.
GUARDS = f"{__file__}\0--guard\0".encode()
SCHEDULER = -1  # MindSpore's scheduler is no rank, but is guarded like one
STARTER = -2  # and so are msrun and mpirun, in the keeper's message

# How long a rank waits for the others at its end, at most. Ranks that are still in the last collective with it need
# little time. A rank that has started another collective would wait for ever, and must fail.
MEET_SECONDS = 10.0

LET_GO = b"!"  # the launcher's message to a rank: it may leave
MESSAGE_BYTES = 1024  # more than any has
LOOK_SECONDS = 0.05

# Linux's numbers, which Python lacks.
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CREDENTIALS = struct.Struct("iII")  # process, user and group


def tell(job: str, **message: object) -> None:
    """Send the launcher a message, which is lost if the launcher is gone. If it stands still, because it is stopped or
    its output is shown page by page, wait until it takes the message or dies."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to_launcher:
        to_launcher.sendto(json.dumps(message).encode(), f"\0{job}")


def receive(messages: socket.socket) -> bytes:
    """The next message to a socket that was `bound` ; nothing, if another user has sent it, who can see the name."""
    message, control, _, _ = messages.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(CREDENTIALS.size))
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
    code = _wait(subprocess.Popen(command), job)
    tell(job, rank=SCHEDULER if role == "MS_SCHED" else STARTER, code=code)
    while _listens(job):
        time.sleep(LOOK_SECONDS)
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
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
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
            code = _wait(process, job, guards=False)
    finally:  # also if a log cannot be opened, because its folder was removed meanwhile
        tell(job, rank=int(rank), code=code)
    return code


def as_in_shells(code: int) -> int:
    """An exit code of Python's `subprocess` as shells have it: 128 + signal, if a signal ended the process."""
    return code if code >= 0 else 128 - code


def _listens(job: str) -> bool:
    """Whether the launcher is there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to_launcher:
        return to_launcher.connect_ex(f"\0{job}") == 0


def _wait(process: subprocess.Popen, job: str, guards: bool = True) -> int:
    """Wait until a process ends, and return its exit code. If the launcher was killed, which could not end the
    processes then, end them."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)  # also what others have left to this process
        if pid == process.pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return as_in_shells(process.returncode)
        if not pid:
            if not _listens(job):
                end_all(job, guards=guards)
            time.sleep(LOOK_SECONDS)


# -- a launch's processes ----------------------------------------------------------------------------------------------


def adopt_orphans() -> None:
    """Become the parent of processes below this one whose parents end. Otherwise they leave the tree."""
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)


def _parents() -> dict[int, int]:
    """The parent of each process that has not ended. One with threads that have not ended has not either: they may
    still use a device."""
    parent_of = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            state, parent, *others = (path / "stat").read_bytes().rpartition(b")")[2].split()
            if state not in (b"Z", b"X") or int(others[15]) > 1:
                parent_of[int(path.name)] = int(parent)
    return parent_of


def end_all(job: str, grace_seconds: float = 0.0, guards: bool = True, spared: Collection[int] = ()) -> set[int]:
    """End the processes of a launch: those below this one, but not below its children `spared` , and those that have
    the launch's environment variable. They get SIGTERM, and SIGKILL `grace_seconds` later, until none is left.

    Guards, keepers, msrun and mpirun come last, if at all: if this process is killed meanwhile, they end the rest. For
    that they must be below this one: another keeper still has its own work. Return the processes of other users, which
    this one may not end.
    """
    kill_from, mark = time.monotonic() + grace_seconds, f"{JOB}={job}".encode()
    looks, others = 0, {os.getpid()}
    while looks < 2:  # a look can miss a process whose parent ends meanwhile
        parent_of = _parents()
        ours = {pid for pid, parent in parent_of.items() if parent == os.getpid()}.difference(spared)
        while more := {pid for pid, parent in parent_of.items() if parent in ours} - ours:
            ours |= more
        left: dict[bool, list[int]] = {True: [], False: []}  # by whether they are guards
        for pid in parent_of.keys() - others:
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
    is_rank, code = role != "MS_SCHED", 0
    path = Path(script).absolute()
    main = types.ModuleType("__main__")
    vars(main).update(__file__=str(path), __builtins__=builtins)
    sys.modules["__main__"] = main
    sys.argv = [script, *arguments]
    if not getattr(sys.flags, "safe_path", False):  # with this flag, Python does not add the script's folder
        sys.path[0] = str(path.resolve().parent)
    try:
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(main))
    except KeyboardInterrupt:
        if is_rank:
            _tell_failure(job, int(rank), 130)
        raise  # Python ends such a process by a signal
    except BaseException as error:
        code = _show(error)
    if code:
        if is_rank:
            _tell_failure(job, int(rank), code)
        sys.exit(code)
    if is_rank:
        wait_for_others(job, int(rank))


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


def _tell_failure(job: str, rank: int, code: int) -> None:
    """Report that the script has failed; threads and exit handlers may keep the process running."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the script may have closed it
            stream.flush()
    tell(job, rank=rank, fails=code)


def wait_for_others(job: str, rank: int) -> None:
    """Report that the script has ended, and wait until those of the others have ended too."""
    with contextlib.suppress(OSError), bound(f"{job}-{rank}") as messages:
        messages.settimeout(MEET_SECONDS)
        tell(job, rank=rank, at_end=True)
        while receive(messages) != LET_GO:
            pass


if __name__ == "__main__":
    if sys.argv[1] in ("--keep", "--guard"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it was ignored, as it may be, exit codes are lost
    if sys.argv[1] == "--keep":
        sys.exit(keep(sys.argv[2:]))
    elif sys.argv[1] == "--guard":
        sys.exit(guard(Path(sys.argv[2]), sys.argv[3:]))
    else:
        run(sys.argv[1], sys.argv[2:])
