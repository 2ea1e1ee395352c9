"""Starts the launcher in tests, finds every process that it started, and asserts that it leaves none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

import gaccum_ms

ROOT = Path(gaccum_ms.__file__).resolve().parents[1]
PYTHONPATH = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"  # finds the package from any folder

# The launcher ends its own processes after TIMEOUT. If it does not, the test ends after LIMIT and fails.
TIMEOUT, LIMIT = 400, 500
ADDRESS = "10.231.77.1"  # of host 0, in `hosts` of conftest.py


def write(path: Path, text: str) -> Path:
    """Write a script with its rank in `rank` . It also runs as the scheduler, where it exits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    prologue = 'import os, sys, time\nif os.environ["MS_ROLE"] == "MS_SCHED": sys.exit()\n'
    path.write_text(prologue + 'rank = int(os.environ["RANK_ID"])\n' + text)
    return path


def ranks_that_wait(folder: Path, number: int) -> Launched:
    """Start `number` ranks. Each has written its process id into ``pid.<rank>`` , and waits for ever."""
    script = write(folder / "script.py", 'open(f"pid.{rank}", "x").write(str(os.getpid()))\ntime.sleep(1000)')
    launched = Launched(script, "-n", str(number))
    for rank in range(number):
        launched.wait_for(folder / f"pid.{rank}")
    return launched


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
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TEST_MARK") == self.mark and process.pid != self.process.pid:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def wait_for(self, path: Path) -> None:
        until = time.monotonic() + LIMIT
        while not path.exists() and self.process.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        assert path.exists(), f"{path} never came: {self.process.poll()}"


def start(hosts: list[list[str]], script: Path, cwd: Path, number: int, *options: str, args=(), env=None) -> Launched:
    """Start the launcher on one host, with logs in a folder of its own."""
    where = ["--nodes", "2", "--node-rank", str(number), "--master-addr", ADDRESS, "--log-dir", f"host {number}"]
    return Launched(script, "-n", "2", *where, *options, args=args, env=env, cwd=cwd, prefix=hosts[number])


def in_mounts_of_its_own(mount: str) -> list[str]:
    """A prefix that runs a command after `mount`, a line of shell. No other process sees the mount."""
    prefix = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    tried = shutil.which("unshare") and subprocess.run([*prefix, "true"], capture_output=True, text=True, timeout=60)
    if not tried or tried.returncode != 0:
        pytest.skip(f"this machine allows no mounts: {tried and tried.stderr.strip()}")
    return prefix
