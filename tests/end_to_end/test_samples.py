"""The README's first command, `bash run.sh` , completely on two and on eight processes; then its parts, on fewer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.launched import Launched
from tests.support.environment import of_users

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "sample_code" / "distributed_gradient_accumulation"
LOSS = re.compile(r"^epoch: \d+ step: \d+, loss is \d+\.\d+(e-\d+)?$", re.MULTILINE)
ACCURACY = re.compile(r"^accuracy on held-out images: (\d+\.\d+)%$", re.MULTILINE)

pytestmark = [pytest.mark.distributed]


@pytest.fixture
def run(tmp_path, monkeypatch) -> Callable[..., subprocess.CompletedProcess]:
    """Run a command in `tmp_path`, as a user with this Python's environment. No process that it starts may outlive
    it."""
    for name in os.environ.keys() - of_users().keys() | {"DATA_PATH"}:
        monkeypatch.delenv(name, raising=False)
    env = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def call(*command: str | Path) -> subprocess.CompletedProcess:
        done = Launched(None, program=[*map(str, command)], env=env, cwd=tmp_path).finish(1600)
        print(done.stdout, done.stderr[-5000:])  # shown if an assertion fails
        return done

    return call


def settings(output: str) -> str:
    """The line in which a run of train.py says what it trains."""
    return re.search(r"^rank \d+ of .*", output, re.MULTILINE)[0]


@pytest.mark.core("two")
@pytest.mark.parametrize(
    ("processes", "arguments"),
    [(8, ["--epochs", "2", "--print-every", "4"]), (2, ["--processes", "2", "--epochs", "3"])],
    ids=["eight", "two"],
)
def test_processes_train_on_the_digits(run, tmp_path, processes, arguments):
    """Eight processes make 24 updates in 2 epochs, so they learn less than two, which make 144 in 3."""
    # The sample folder's run.sh hands over to the project's, so both are run here.
    logs = tmp_path / "the logs"
    done = run("bash", SAMPLE / "run.sh", "--log-dir", logs, "--timeout", "1500", *arguments)
    assert done.returncode == 0
    assert "installing" not in done.stdout
    for rank in range(processes):
        stdout = (logs / "1" / f"rank.{rank}" / "stdout").read_text()
        assert len(LOSS.findall(stdout)) >= 6
        assert settings(stdout).startswith(f"rank {rank} of {processes} on CPU: ")
        assert (logs / "1" / f"rank.{rank}" / "stderr").exists()
    rank_0 = (logs / "1" / "rank.0" / "stdout").read_text()
    assert float(ACCURACY.search(rank_0)[1]) > (90 if processes == 2 else 20)
    assert rank_0 in done.stdout
    assert done.stdout.count("notice: MindSpore has no semi-auto parallel mode on CPU; training in data parallel") == 1
    assert f"logs: {logs}/1/rank.N" in done.stdout.splitlines()[-1]
    assert (logs / "msrun" / "scheduler.log").exists(), "msrun started them"


@pytest.mark.thorough
def test_mnist_takes_the_tutorials_values_and_arguments_override_them(programs, tmp_path):
    """One process needs no launcher."""
    data = tmp_path / "my data"
    assert programs.run(SAMPLE / "prepare_data.py", str(data), folder=tmp_path).returncode == 0
    arguments = ["--epochs", "3", "--accumulation-steps", "5"]
    done = programs.run(SAMPLE / "train.py", *arguments, folder=tmp_path, DATA_PATH=str(data))
    assert done.returncode == 0, done.stderr
    assert settings(done.stdout) == (
        "rank 0 of 1 on CPU: 3 epochs, batches of 32 in 4 micro-batches, batches per update: 5, learning rate 0.01, "
        f"data: {data}"
    )
    # 1,536 images are 48 batches an epoch: the 100th step is the fourth of the third epoch.
    assert len(LOSS.findall(done.stdout)) == 1
    assert "epoch: 3 step: 4, loss is" in done.stdout
    done = programs.run(SAMPLE / "train.py", "--help", folder=tmp_path, DATA_PATH="anywhere")
    assert "--epochs EPOCHS passes over the data (default: 10)" in " ".join(done.stdout.split())


@pytest.mark.thorough
def test_data_made_by_several_processes_at_once_are_whole(run, tmp_path):
    one = f"'{sys.executable}' '{SAMPLE}/prepare_data.py' data &"
    # They are waited for by number: `wait -n` returns 127 for a process that has already ended.
    script = f"{one} a=$!; {one} b=$!; wait $a && wait $b"
    assert run("bash", "-c", script).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["data"], "nothing half-made stays"
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "data").iterdir()}
    assert sizes == {
        "train-images-idx3-ubyte": 16 + 1536 * 28 * 28,
        "train-labels-idx1-ubyte": 8 + 1536,
        "t10k-images-idx3-ubyte": 16 + 261 * 28 * 28,
        "t10k-labels-idx1-ubyte": 8 + 261,
    }


def test_run_sh_starts_the_script_it_is_given_and_fails_as_it_does(run, tmp_path):
    script = tmp_path / "my script.py"
    script.write_text('import os, sys\nsys.exit(os.environ["RANK_ID"] == "1" and "no good: " + sys.argv[1])')
    options = ["--processes", "2", "--timeout", "500", "--script", script]
    done = run("bash", ROOT / "run.sh", *options, "a b")
    assert done.returncode == 1
    assert "rank 1 failed with exit code 1" in done.stderr
    assert "no good: a b" in done.stderr
