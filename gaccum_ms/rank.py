"""One rank's life: a guard outside its process, and inside it the wait for the others before it leaves.

The launcher starts ``rank.py --guard LOG_DIR SCRIPT ...`` for each rank. The guard keeps the rank's output in
``LOG_DIR/1/rank.N/stdout`` and ``stderr``, tells the launcher its process id and its exit code, whichever of msrun and
mpirun stands between them, and ends it when the launcher is gone. It starts ``rank.py SCRIPT ...``, which runs the
script as Python would, and at its end waits for the other ranks: one that leaves first can break the collective that
the others are still in, because what it sent them goes with it.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import socket
import subprocess
import sys
import types
from pathlib import Path

TUNE = "GACCUM_MS_TUNE_CPU_THREADS"  # set: call tune_cpu() before the script
JOB = "GACCUM_MS_JOB"  # "<pid of the launcher>-<random>": marks all processes of one launch
SCHEDULER = -1  # MindSpore's scheduler is no rank, but is guarded as one

# How long a rank at its end waits for the others at most. Those that are still in the last collective with it need a
# moment; one that has started another would wait for ever for a rank that never comes to it, and must fail.
MEET_SECONDS = 10.0


def tell(job: str, **message: object) -> None:
    """Send the launcher a message; it may be gone."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to_launcher:
        to_launcher.settimeout(MEET_SECONDS)
        to_launcher.sendto(json.dumps(message).encode(), f"\0{job}")


def guard(log_dir: Path, command: list[str]) -> int:
    """Run a rank, or the scheduler, and return its exit code: 128 + signal where a signal ended it, as in shells."""
    env = dict(os.environ)
    job = env[JOB]
    command = [sys.executable, __file__, *command]
    if env.get("MS_ROLE") == "MS_SCHED":
        code = _wait(subprocess.Popen(command, env=env), job)
        tell(job, rank=SCHEDULER, code=code)
        return code
    rank = env.get("OMPI_COMM_WORLD_RANK") or env["RANK_ID"]
    if "OMPI_COMM_WORLD_RANK" in env:  # from here on MindSpore's variables say it all; Open MPI's would mislead it
        env = {k: v for k, v in env.items() if not k.startswith(("OMPI_", "PMIX_"))}
        env |= {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": rank, "RANK_ID": rank, "DEVICE_ID": rank}
    folder = log_dir / "1" / f"rank.{rank}"
    with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        process = subprocess.Popen(command, env=env, stdout=stdout, stderr=stderr)
        tell(job, rank=int(rank), pid=process.pid)
        code = _wait(process, job)
    tell(job, rank=int(rank), code=code)
    return code


def _wait(process: subprocess.Popen, job: str) -> int:
    launcher = Path(f"/proc/{job.split('-')[0]}/stat")
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


def run(script: str, arguments: list[str]) -> None:
    """Run a script as ``python script`` does; if it ends well, wait for the other ranks."""
    job, role, rank = (os.environ.get(name, "") for name in (JOB, "MS_ROLE", "RANK_ID"))
    path = Path(script).absolute()
    main = types.ModuleType("__main__")
    vars(main).update(__file__=str(path), __builtins__=builtins)
    sys.modules["__main__"] = main
    sys.argv = [script, *arguments]
    if not getattr(sys.flags, "safe_path", False):  # with it, Python puts no script's folder there
        sys.path[0] = str(path.resolve().parent)
    code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    if os.environ.pop(TUNE, None) and role != "MS_SCHED":  # not for what the script starts in its turn
        from gaccum_ms import tune_cpu

        print(tune_cpu(), flush=True)
    try:
        exec(code, vars(main))
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    if role != "MS_SCHED":
        _wait_for_others(job, rank)


def _wait_for_others(job: str, rank: str) -> None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to_launcher:
        to_launcher.settimeout(MEET_SECONDS)
        to_launcher.bind(f"\0{job}-{rank}")
        to_launcher.sendto(json.dumps({"rank": int(rank), "at_end": True}).encode(), f"\0{job}")
        to_launcher.recv(1)


if __name__ == "__main__":
    if sys.argv[1] == "--guard":
        sys.exit(guard(Path(sys.argv[2]), sys.argv[3:]))
    run(sys.argv[1], sys.argv[2:])
