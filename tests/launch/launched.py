"""Starts the launcher in tests, finds every process that it started, and asserts that it leaves none."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import gaccum_ms

ROOT = Path(gaccum_ms.__file__).resolve().parents[1]
PYTHONPATH = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"  # finds the package from any folder
TRAINS = Path(__file__).resolve().with_name("training_rank.py")

# The beginning of a script whose ranks communicate by MindSpore: `total()` is 3 on each of two ranks.
CONNECTED = """import os, sys, time
import mindspore as ms
from mindspore import ops
from mindspore.communication import get_rank, init

ms.set_device("CPU")
ms.set_context(mode=ms.PYNATIVE_MODE)
init()
rank, add = get_rank(), ops.AllReduce()


def total():
    return float(add(ms.Tensor([rank + 1.0])).asnumpy()[0])


"""

# The launcher ends its own processes after TIMEOUT. If it does not, the test ends after LIMIT and fails.
TIMEOUT, LIMIT = 400, 500


def write(path: Path, text: str) -> Path:
    """Write a script with its rank in `rank` . It also runs as the scheduler, where it exits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    prologue = 'import os, sys, time\nif os.environ["MS_ROLE"] == "MS_SCHED": sys.exit()\n'
    path.write_text(prologue + 'rank = int(os.environ["RANK_ID"])\n' + text)
    return path


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until this becomes true; fail after a long time."""
    until = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def processes(right: Callable[[psutil.Process], object]) -> list[psutil.Process]:
    """The processes for which this is true, of those that may be looked at."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found += [process] if right(process) else []
    return found


def free_ports(number: int) -> list[int]:
    """Ports on which nothing listens."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in sockets]


class Launched:
    """A running launcher whose processes can be found, even those that left its tree.

    It starts in `cwd`, by default the script's folder. The command is ``python -m gaccum_ms.launch`` or `program`
    (``bash run.sh``, for example), after `prefix`, which may run it somewhere else.
    """

    def __init__(self, script: Path, *options: str, args=(), env=None, cwd=None, prefix=(), program=None) -> None:
        self.mark = uuid.uuid4().hex
        if program is None:
            program = [sys.executable, "-m", "gaccum_ms.launch", "--timeout", str(TIMEOUT)]
            env = {"PYTHONPATH": PYTHONPATH, **(env or {})}
        command = [*prefix, *program, *options, *([str(script)] if script else []), *args]
        env = {**os.environ, **(env or {}), "TEST_MARK": self.mark}
        self.process = subprocess.Popen(
            command, env=env, cwd=cwd or script.parent, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def finish(self, limit: float = LIMIT) -> subprocess.CompletedProcess:
        try:
            out, err = self.process.communicate(timeout=limit)
        finally:
            self.process.kill()
            left = self.running()
            for process in left:
                process.kill()
        assert not left, f"left running: {left}"
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, out, err)

    def running(self) -> list[psutil.Process]:
        """The processes that were started, but not the launcher itself, nor Ray's."""
        return processes(
            lambda process: process.environ().get("TEST_MARK") == self.mark and process.pid != self.process.pid
        )

    def wait_for(self, *paths: Path) -> None:
        """Wait until these files are there, while the launcher runs."""
        wait_until(lambda: self.process.poll() is not None or all(path.exists() for path in paths))
        assert all(path.exists() for path in paths), f"{paths} never came: {self.process.poll()}"


def printed(script: Path, *options: str, args=()) -> str:
    """The script that the launcher prints with `--dry-run` ."""
    command = [sys.executable, "-m", "gaccum_ms.launch", *options, str(script), *args]
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, cwd=script.parent, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def in_mounts_of_its_own(mount: str) -> list[str]:
    """A prefix that runs a command after `mount`, a line of shell. No other process sees the mount."""
    prefix = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    tried = shutil.which("unshare") and subprocess.run([*prefix, "true"], capture_output=True, text=True, timeout=60)
    if not tried or tried.returncode != 0:
        pytest.skip(f"this machine allows no mounts: {tried and tried.stderr.strip()}")
    return prefix
