"""Starts a worker script on two ranks with the project's own launcher, and reads back what each rank wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
Results = dict[str, np.ndarray]


def run_on_two_ranks(worker: str, out: Path) -> list[Results]:
    """The arrays that each rank of ``worker OUT`` left in ``OUT/rank<N>.npz``."""
    command = [sys.executable, "-m", "gaccum_ms.launch", "-n", "2", "--log-dir", str(out / "log"), "--timeout", "300"]
    path = os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
    finished = subprocess.run(
        [*command, str(HERE / worker), str(out)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=out,
        capture_output=True,
        text=True,
        timeout=330,
    )
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    return [dict(np.load(out / f"rank{rank}.npz")) for rank in range(2)]


def case(results: Results, name: str) -> Results:
    """What was kept under ``name/``."""
    found = {key.removeprefix(name + "/"): value for key, value in results.items() if key.startswith(name + "/")}
    assert found, name
    return found
