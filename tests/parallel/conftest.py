"""The finished graphs of all cases, compiled once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import finished_graph
import no_device
import numpy as np
import pytest

from gaccum_ms import launch

TIME_LIMIT = 900  # seconds; two cores need about a quarter of it


class Case(NamedTuple):
    """What the compiler made of one training step."""

    folder: Path

    @property
    def message(self) -> str:
        return (self.folder / "message").read_text()

    @property
    def seconds(self) -> float:
        return float((self.folder / "seconds").read_text())

    @property
    def program(self) -> finished_graph.Program:
        finished = self.folder / "finished.ir"
        assert finished.exists(), f"'{self.folder.name}' was not finished: {self.message}"
        return finished_graph.read(finished)

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        return dict(np.load(self.folder / "parameters.npz"))


@pytest.fixture(scope="session")
def cases(tmp_path_factory):
    """Compiles everything that compile_worker.py names, on eight ranks; returns the function from name to case."""
    if reason := no_device.why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("parallel")
    environment = no_device.environment(folder)
    out, worker = folder / "out", Path(__file__).with_name("compile_worker.py")
    command = [sys.executable, launch.__file__, "--processes", "8", "--log-dir", str(folder / "log")]
    command += ["--timeout", str(TIME_LIMIT), str(worker), str(out)]
    # Without the device the ranks cannot leave in order; what counts is what rank 0 has left.
    limit = TIME_LIMIT + 60
    ended = subprocess.run(command, env=environment, cwd=folder, text=True, capture_output=True, timeout=limit)
    assert (out / "done").exists(), ended.stdout + ended.stderr
    return lambda name: Case(out / name)
