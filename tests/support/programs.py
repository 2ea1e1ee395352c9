"""Runs users' programs, each in a separate process, which is forked from a process that has imported MindSpore already.

Run as a program, this file is that process: a line on its standard input names a program, and it answers with the exit
code.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT = 1200  # seconds


class Programs:
    """Runs programs. As a context manager, it ends the waiting process.

    Args:
        path (str): Folders of modules that the programs import.
    """

    def __init__(self, path: str = str(ROOT)) -> None:
        self.path = path
        self.waiting: subprocess.Popen | None = None

    def run(self, script: Path, *arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
        """Run ``python SCRIPT ARGUMENTS`` in this folder; its output is written to two files there."""
        if self.waiting is None:
            from tests.support.environment import of_users  # not above: as a program, this file does not find it

            path = os.pathsep.join([self.path, os.environ.get("PYTHONPATH", "")])
            self.waiting = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve())],
                env={**of_users(), "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        said = [folder / f"{script.stem}.{name}" for name in ("stdout", "stderr")]
        program = [str(script), *arguments], str(folder), environment, [str(file) for file in said]
        self.waiting.stdin.write(json.dumps(program).encode() + b"\n")
        self.waiting.stdin.flush()
        if not select.select([self.waiting.stdout], [], [], TIME_LIMIT)[0]:
            self.end()
            raise AssertionError(f"{script.name} did not end in {TIME_LIMIT} s")
        code = int(self.waiting.stdout.readline())
        return subprocess.CompletedProcess(program[0], code, *(file.read_text() for file in said))

    def end(self) -> None:
        """End the waiting process, and the program that it runs."""
        if self.waiting is not None:
            self.waiting.kill()
            self.waiting.communicate()
            self.waiting = None

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def wait() -> None:
    """Run the named programs, one after another."""
    import mindspore  # noqa: F401
    from mindspore._c_expression import fork_utils

    gc.collect()
    gc.freeze()  # MindSpore collects garbage at each compilation; present objects are excluded
    for line in sys.stdin:
        fork_utils.prepare_before_fork()
        child = os.fork()
        if child == 0:
            fork_utils.prctl_set_pdeathsig(signal.SIGKILL)
            fork_utils.child_at_fork()
            run(*json.loads(line))
        fork_utils.parent_at_fork()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def run(words: list[str], folder: str, environment: dict[str, str], said: list[str]) -> Any:
    """Become the program, and end with its exit code."""
    for number, file in enumerate(said, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(folder)
    os.environ.update(environment)
    sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
    code = 1
    try:
        runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    wait()
