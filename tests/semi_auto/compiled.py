"""Compiles the training steps of compile_worker.py, and finds the finished graphs."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

import gaccum_ms
from tests.semi_auto import finished_graph
from tests.support import no_device

RANKS = 8
AGAIN = " # "  # in a case's name, before a number: the same step, compiled once more
TIME_LIMIT = 3 * 3600  # seconds


def stages_of(settings: dict) -> int:
    """The number of a case's pipeline stages, by its settings."""
    return settings.get("pipeline_stages", 1)


def folder_of(out: Path, name: str, stage: int) -> Path:
    """Where a case's graph of this stage is. It is complete once there is a file "compiled"."""
    return out / name / f"stage_{stage}"


class Case(NamedTuple):
    """The compiler's results for one training step; with a pipeline, for its first stage."""

    folder: Path

    @property
    def message(self) -> str:
        return (self.folder / "message").read_text()

    @property
    def copies(self) -> list[str]:
        """With a pipeline: the Parameters of this stage that MindSpore takes for copies of another stage's, and leaves
        out of checkpoints."""
        return (self.folder / "copies").read_text().split()

    @property
    def seconds(self) -> float:
        """Processor time of the compilation."""
        return float((self.folder / "seconds").read_text())

    @property
    def program(self) -> finished_graph.Program:
        finished = self.folder / "finished.ir"
        assert finished.exists(), f"'{self.folder.parent.name}' was not finished: {self.message}"
        return _read(finished)

    @property
    def adding(self) -> Case:
        """With windows of several batches: the graph that only adds."""
        return Case(self.folder / "adding")

    def stage(self, number: int) -> Case:
        """With a pipeline: the results for this stage."""
        return Case(self.folder.with_name(f"stage_{number}")) if number else self

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        return dict(np.load(self.folder / "parameters.npz"))


_read = functools.cache(finished_graph.read)  # tests share graphs, and none changes one


class Compiler:
    """Eight ranks, of which the first, or the first of each stage, compiles cases by their names, each when it is first
    requested. As a context manager, it ends the ranks. `folder` is empty. To save graphs takes longer than to compile
    them. `cases` : the file of this folder that has the steps."""

    def __init__(self, folder: Path, saves_graphs: bool = True, cases: str = "cases") -> None:
        environment = {
            **no_device.environment(folder),
            "PYTHONPATH": str(Path(gaccum_ms.__file__).parents[1]),
            "MS_DEV_SAVE_GRAPHS": "2" if saves_graphs else "0",
            "MS_DEV_DUMP_IR_PASSES": "validate",
            "MS_DEV_SAVE_GRAPHS_PATH": str(folder / "graphs"),
            "GLOG_v": "3",
            "LOG_MF_PATH": str(folder / "log_of_mindformers"),
        }
        self.out, self.said = folder / "out", folder / "said"
        (self.out / "wanted").mkdir(parents=True)
        command = [sys.executable, "-m", f"{__package__}.compile_worker", str(self.out), f"{__package__}.{cases}"]
        with self.said.open("w") as said:
            self.ranks = subprocess.Popen(command, env=environment, cwd=folder, stdout=said, stderr=subprocess.STDOUT)

    def __call__(self, name: str, stages: int = 1) -> Case:
        (self.out / "wanted" / name).touch()
        for stage in range(stages):
            while not (folder_of(self.out, name, stage) / "compiled").exists():
                if self.ranks.poll() is not None:
                    raise RuntimeError(f"{self.ranks.args[1]} failed:\n{self.said.read_text()[-6000:]}")
                time.sleep(0.05)
        return Case(folder_of(self.out, name, 0))

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.ranks.kill()
        self.ranks.wait()
