"""What run.sh asks of Python, pip and the launcher: recorded by a `python` that does nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


class Recorder:
    """A project whose `python` has every module and records its calls; `answers` says what some of them exit with."""

    def __init__(self, folder: Path) -> None:
        self.project = folder / "the project"
        self.project.mkdir()
        shutil.copy(ROOT / "run.sh", self.project)
        self._calls = folder / "calls"
        self._answers = folder / "answers"
        self._answers.touch()
        self._tools = folder / "bin"
        self._tools.mkdir()
        python = self._tools / "python"
        python.write_text(
            f"""#!/bin/bash
[[ $2 == *gpu.missing_packages* ]] && set -- gpu
[ "$1" = -c ] && exit 0
echo "$*" >>'{self._calls}'
while read -r code words; do
    if [[ "$*" == *"$words"* ]]; then [ "$code" = 0 ] || echo "ERROR: as asked"; exit "$code"; fi
done <'{self._answers}'
"""
        )
        python.chmod(0o755)

    def run(self, *arguments: str, answers: dict[str, int] | None = None) -> subprocess.CompletedProcess:
        """Run run.sh from another folder."""
        self._calls.write_text("")
        self._answers.write_text("".join(f"{code} {words}\n" for words, code in (answers or {}).items()))
        env = {**os.environ, "PATH": f"{self._tools}{os.pathsep}{os.environ['PATH']}"}
        for name in ("PROCESSES", "LAUNCHER", "SCRIPT", "LOG_DIR", "TIMEOUT", "DATA_PATH"):
            env.pop(name, None)
        command = ["bash", str(self.project / "run.sh"), *arguments]
        return subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=60)

    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines()


@pytest.fixture
def recorder(tmp_path) -> Recorder:
    return Recorder(tmp_path)


SHARED = r"-m pytest --numprocesses [1-9]\d* --dist loadgroup --no-loadscope-reorder --durations 25"


@pytest.mark.parametrize(
    ("words", "tier"),
    [
        (["test"], " -m not thorough"),
        (["test", "all"], ""),
        (["test", "rest"], " -m thorough"),
        (["test", "all", "-x"], " -x"),
    ],
    ids=" ".join,
)
def test_all_cores_share_the_tests_of_a_tier(recorder, words, tier):
    done = recorder.run(*words)
    assert done.returncode == 0, done.stderr
    gpu, pytest_ = recorder.calls()
    assert gpu == "gpu"
    assert re.fullmatch(SHARED + re.escape(tier), pytest_)
    assert recorder.run(*words, answers={"gpu": 0, "--numprocesses": 1}).returncode == 1


def test_arguments_of_pytest_run_some_tests_of_any_tier_in_one_process(recorder):
    assert recorder.run("test", "-k", "launch").returncode == 0
    assert recorder.calls() == ["-m pytest -k launch"]


def test_the_gpus_libraries_are_installed_once(recorder):
    assert recorder.run("test", "parallel", "-x", answers={"gpu": 0}).returncode == 0
    assert recorder.calls() == ["gpu", "-m pytest tests/parallel -x"]
    assert recorder.run("test", "parallel", answers={"pip": 0, "pytest": 0, "gpu": 1}).returncode == 0
    install = next(call for call in recorder.calls() if "pip install" in call)
    assert install.endswith(f"--editable {recorder.project}[gpu]")


def test_libraries_that_cannot_be_had_take_one_line_and_the_tests_go_on(recorder):
    done = recorder.run("test", answers={"pip install": 1, "pytest": 0, "gpu": 1})
    assert done.returncode == 0
    assert "the extra 'gpu' was not installed: ERROR: as asked\n" in done.stdout
    assert re.match(SHARED, recorder.calls()[-1])


def test_options_reach_the_launcher_and_the_rest_the_script(recorder):
    script = recorder.project / "a script.py"
    options = ["--nodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1", "--master-port", "9000"]
    options += ["--start-timeout", "5"]
    done = recorder.run(*options, "--script", str(script), "--epochs", "3")
    assert done.returncode == 0, done.stderr
    given = "--processes 8 --launcher msrun --log-dir log_output --timeout 0 " + " ".join(options)
    assert recorder.calls()[-1] == f"{recorder.project}/gaccum_ms/launch.py {given} {script} --epochs 3"


def test_an_option_without_its_value_is_named(recorder):
    done = recorder.run("--node-rank")
    assert done.returncode == 2
    assert "--node-rank needs a value" in done.stderr


def test_check_installs_nothing(recorder):
    assert recorder.run("check").returncode == 0
    assert recorder.calls() == [f"{recorder.project}/gaccum_ms/check.py"]


@pytest.mark.parametrize("failing", [None, "lint", "test", "test rest"])
def test_ci_runs_the_linters_and_each_test_once(tmp_path, failing):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "run.sh").write_text(f'echo "$*"\n[ "$*" != "{failing}" ]\n')
    done = subprocess.run(["bash", str(tmp_path / ".ci" / "run")], cwd="/", capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["lint", "test", "test rest"]
    assert done.returncode == (failing is not None)
