"""Ranks and processes of theirs that hide from their launch, and how tests find and kill them."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import psutil

from gaccum_ms.launch import guard
from tests.launch.launched import LIMIT, Launched, processes, wait_until

# Each rank has a child in a session of its own, and a daemon, both without environment variables. Rank 0 becomes
# another program without any. Rank 1 overwrites its own in memory, as setproctitle does.
HIDES = """
import ctypes, signal, subprocess
count = os.environ["GACCUM_MS_RESTART_COUNT"]
subprocess.Popen(["sleep", f"1000{count}"], env={}, start_new_session=True)
subprocess.run(["sh", "-c", f"setsid sleep 1000{count} & exit 0"], env={})
begin, end = map(int, open("/proc/self/stat").read().rpartition(")")[2].split()[47:49])
ctypes.memset(begin, 0, end - begin)
assert b"=" not in open("/proc/self/environ", "rb").read()
open(f"up.{count}.{rank}", "x")
"""
STAYS = 'if rank == 0: os.execve("/bin/sleep", ["sleep", "1000"], {})\ntime.sleep(1000)\n'


def here(folder: Path) -> list[psutil.Process]:
    """The processes that run in a folder, whatever else is known of them."""
    return processes(lambda each: each.cwd() == str(folder) and each.status() != psutil.STATUS_ZOMBIE)


def of_the_launcher(folder: Path, which: str) -> list[psutil.Process]:
    """The launcher's guards, or its keeper."""
    words = [guard.__file__, which]
    return processes(lambda each: each.cwd() == str(folder) and words in (each.cmdline()[1:3], each.cmdline()[2:4]))


def kill(launched: Launched, folder: Path, victims: str) -> None:
    """Kill some of the launcher's processes at the same moment, as soon as there is one."""
    killed: list[psutil.Process] = []

    def there_are() -> bool:
        killed[:] = [psutil.Process(launched.process.pid)] if "launcher" in victims else []
        guards = of_the_launcher(folder, "--guard")
        killed.extend(guards[-1:] if "a-guard" in victims else guards if "guards" in victims else [])
        killed.extend(of_the_launcher(folder, "--keep") if "keeper" in victims else [])
        return bool(killed)

    wait_until(there_are)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in killed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def ends(launched: Launched, folder: Path) -> int:
    """Wait until the launcher has ended, and then all else, and return its exit code."""
    try:
        launched.process.wait(LIMIT)
        if launched.process.returncode < 0:  # it was killed: its keeper and guards end the rest, and then themselves
            wait_until(lambda: not any(of_the_launcher(folder, which) for which in ("--keep", "--guard")))
            psutil.wait_procs(here(folder), timeout=30)
        assert not here(folder), "they were left running"
    finally:
        for process in here(folder):
            process.kill()
        launched.process.communicate()
    return launched.process.returncode
