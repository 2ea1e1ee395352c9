"""The README's first command, `bash run.sh` , on two processes; then its program in one."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.launch.launched import Launched

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "sample_code" / "distributed_gradient_accumulation"
LOSS = re.compile(r"^epoch: \d+ step: \d+, loss is \d+\.\d+(e-\d+)?$", re.MULTILINE)
ACCURACY = re.compile(r"^accuracy on held-out images: (\d+\.\d+)%$", re.MULTILINE)


def settings(output: str) -> str:
    """The line in which a run of train.py says what it trains."""
    return re.search(r"^rank \d+ of .*", output, re.MULTILINE)[0]


@pytest.mark.distributed
def test_processes_train_on_the_digits(tmp_path, monkeypatch):
    """No process that it starts may outlive it."""
    monkeypatch.delenv("DATA_PATH", raising=False)
    env = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    # The sample folder's run.sh hands over to the project's, so both are run here.
    logs = tmp_path / "the logs"
    words = ["--log-dir", logs, "--timeout", "1500", "--processes", "2", "--epochs", "3"]
    done = Launched(None, program=["bash", *map(str, [SAMPLE / "run.sh", *words])], env=env, cwd=tmp_path).finish(1600)
    print(done.stdout, done.stderr[-5000:])  # shown if an assertion fails
    assert done.returncode == 0
    assert "installing" not in done.stdout
    for rank in range(2):
        stdout = (logs / "1" / f"rank.{rank}" / "stdout").read_text()
        assert len(LOSS.findall(stdout)) >= 6
        assert settings(stdout).startswith(f"rank {rank} of 2 on CPU: ")
        assert (logs / "1" / f"rank.{rank}" / "stderr").exists()
    rank_0 = (logs / "1" / "rank.0" / "stdout").read_text()
    assert float(ACCURACY.search(rank_0)[1]) > 90
    assert rank_0 in done.stdout
    assert done.stdout.count("notice: MindSpore has no semi-auto parallel mode on CPU; training in data parallel") == 1
    assert f"logs: {logs}/1/rank.N" in done.stdout.splitlines()[-1]
    assert (logs / "msrun" / "scheduler.log").exists(), "msrun started them"


def test_mnist_takes_the_tutorials_values_and_arguments_override_them(programs, tmp_path):
    """One process needs no launcher. The data are scikit-learn's digits in MNIST's files."""
    pytest.importorskip("sklearn", reason="scikit-learn is in the extra 'test'")
    digits = tmp_path / "data"
    assert programs.run(SAMPLE / "prepare_data.py", str(digits), folder=tmp_path).returncode == 0
    arguments = ["--epochs", "3", "--accumulation-steps", "5"]
    variables = {"DATA_PATH": str(digits), "MS_DEV_HOST_BLOCKING_RUN": "1"}
    done = programs.run(SAMPLE / "train.py", *arguments, folder=tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    assert settings(done.stdout) == (
        "rank 0 of 1 on CPU: 3 epochs, batches of 32 in 4 micro-batches, batches per update: 5, learning rate 0.01, "
        f"data: {digits}"
    )
    # 1,536 images are 48 batches an epoch: the 100th step is the fourth of the third epoch.
    assert len(LOSS.findall(done.stdout)) == 1
    assert "epoch: 3 step: 4, loss is" in done.stdout
