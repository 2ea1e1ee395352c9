"""Starts a worker script on ranks with the project's own launcher, or alone, and reads each rank's results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.support import paths
from tests.support.ranks import Asked

Results = dict[str, np.ndarray]


def run_on_ranks(ranks: int, worker: str, out: Path, *arguments: str, time_limit: int = 600) -> list[Results]:
    """The arrays in each rank's ``OUT/rank<N>.npz`` , after ``worker OUT ARGUMENTS`` ; no process is left.

    It fails after `time_limit` seconds, for instance if ranks wait for each other for ever. A single rank is a process
    without launcher.
    """
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "gaccum_ms.launch", "-n", str(ranks), "--log-dir", str(out / "log")]
        command += ["--timeout", str(time_limit)]
    finished = subprocess.run(
        [*command, str(paths.worker(worker)), str(out), *arguments],
        env={**os.environ, "PYTHONPATH": paths.python_path()},
        cwd=out,
        capture_output=True,
        text=True,
        timeout=time_limit + 30,
    )
    left = [process.info for process in psutil.process_iter(["pid", "cmdline"]) if str(out) in _words(process)]
    assert not left, left
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    return [dict(np.load(out / f"rank{rank}.npz")) for rank in range(ranks)]


def results_of(worker: str) -> Any:
    """For a test module: a fixture of each rank's results of a worker in tests/ranks, by case."""
    import pytest  # not above: ranks import this file too

    @pytest.fixture(scope="module")
    def results(rank_pair, tmp_path_factory) -> list[Results]:
        return rank_pair.worker(f"tests.ranks.{worker}", tmp_path_factory.mktemp(worker))

    return results


def _words(process: psutil.Process) -> list[str]:
    return process.info["cmdline"] or []


def leave(out: Path, rank: int, results: Results) -> None:
    """The end of a worker: writes its results, and waits for the other ranks, because a rank that leaves first breaks
    the others' last collective."""
    import mindspore as ms
    from mindspore import ops

    np.savez(out / f"rank{rank}.npz", **results)
    if "MS_ROLE" in os.environ:  # started by the launcher
        ops.AllReduce()(ms.Tensor([1.0])).asnumpy()


def case(results: Results, name: str) -> Results:
    """The arrays whose names begin with ``name/`` ."""
    if isinstance(results, Asked):
        results.ask(name)
    found = {key.removeprefix(name + "/"): value for key, value in results.items() if key.startswith(name + "/")}
    assert found, name
    return found
