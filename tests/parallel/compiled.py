"""What the compiler makes of the training steps that compile_worker.py names: compile them, and find what it left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import finished_graph
import no_device
import numpy as np

import gaccum_ms
from gaccum_ms import launch

RANKS = 8
TIME_LIMIT = 900  # seconds; two cores need about a quarter of it


class Case(NamedTuple):
    """What the compiler made of one training step."""

    folder: Path

    @property
    def message(self) -> str:
        return (self.folder / "message").read_text()

    @property
    def seconds(self) -> float:
        """Processor time of the compilation."""
        return float((self.folder / "seconds").read_text())

    @property
    def program(self) -> finished_graph.Program:
        finished = self.folder / "finished.ir"
        assert finished.exists(), f"'{self.folder.name}' was not finished: {self.message}"
        return finished_graph.read(finished)

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        return dict(np.load(self.folder / "parameters.npz"))


def compile_cases(folder: Path, *names: str) -> Path:
    """Compile the cases of these names, or all that the tests need, on eight ranks: a folder of each in the result."""
    environment = {
        **no_device.environment(folder),
        "PYTHONPATH": str(Path(gaccum_ms.__file__).parents[1]),
        "MS_DEV_SAVE_GRAPHS": "2",
        "MS_DEV_SAVE_GRAPHS_PATH": str(folder / "graphs"),
        "GLOG_v": "3",
    }
    out, worker = folder / "out", Path(__file__).with_name("compile_worker.py")
    command = [sys.executable, launch.__file__, "--processes", str(RANKS), "--log-dir", str(folder / "log")]
    command += ["--timeout", str(TIME_LIMIT), str(worker), str(out), *names]
    # Without the device the ranks cannot leave in order; what counts is what rank 0 has left.
    limit = TIME_LIMIT + 60
    ended = subprocess.run(command, env=environment, cwd=folder, text=True, capture_output=True, timeout=limit)
    if not (out / "done").exists():
        raise RuntimeError(f"compile_worker.py failed:\n{ended.stdout[-3000:]}{ended.stderr[-3000:]}")
    return out
