"""The calls of run.sh to Python, pip and the launcher, recorded by a `python` that does nothing else."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gaccum_ms.launch.options import parse

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "cp", "dirname", "flock", "grep", "mkdir", "rm", "sed")


class Recorder:
    """A project whose `python` records its calls. It has every module except the ones in `lacks`, which ``pip install``
    adds."""

    def __init__(self, folder: Path) -> None:
        self.project = folder / "the project"
        self.project.mkdir()
        for name in ("run.sh", "setup.py"):
            shutil.copy(ROOT / name, self.project)
        for name in ("gaccum_ms", "sample_code"):
            (self.project / name).symlink_to(ROOT / name)
        self.sample = self.project / "sample_code" / "distributed_gradient_accumulation" / "train.py"
        self._calls, self._answers, self._tools = (folder / name for name in ("calls", "answers", "bin"))
        self._tools.mkdir()
        for name in TOOLS:  # there is no other Python
            (self._tools / name).symlink_to(shutil.which(name))
        self.tool(
            "python",
            f"""#!/bin/bash
[[ "$1 $2" == -c*purelib* ]] && exec dirname "$0"
if [ "$1" = -c ]; then
    for name in "${{@:3}}"; do grep -qsx "$name" "$(dirname "$0")/lacks" && printf '%s ' "$name"; done | sed 's/ $//'
    exit 0
fi
[ "$3" = --print-script ] && exec '{sys.executable}' "$@"
where=''; [ "$(dirname "$0")" -ef '{self._tools}' ] || where=' in .venv'
echo "$*$where" >>'{self._calls}'
printf '%s\\0' "$@" >'{self._calls}.last'
while read -r code words; do
    if [[ " $* " == *" $words "* ]]; then [ "$code" = 0 ] || echo "ERROR: as asked"; exit "$code"; fi
done <'{self._answers}'
if [ "$2" = venv ]; then
    mkdir -p "$3/bin" && cp -p "$0" "$3/bin/python"
    echo mindspore >"$3/bin/lacks"
elif [ "$2" = pip ]; then
    rm -f "$(dirname "$0")/lacks"
fi
exit 0
""",
        )

    def lacks(self, *modules: str) -> None:
        """Set the modules that the active Python lacks."""
        (self._tools / "lacks").write_text("".join(f"{module}\n" for module in modules))

    def tool(self, name: str, text: str) -> None:
        """Put a program on PATH."""
        (self._tools / name).write_text(text)
        (self._tools / name).chmod(0o755)

    def run(self, *arguments: str, answer: str = "", code: int = 0) -> subprocess.CompletedProcess:
        """Run run.sh from another folder, and check its exit code. A call with the words `answer` ends with it too."""
        self._calls.write_text("")
        self._answers.write_text(f"{code} {answer}\n" if answer else "")
        env = {**os.environ, "PATH": str(self._tools), "PYENV_ROOT": str(self._tools), "EXTRAS": ""}
        command = [str(self._tools / "bash"), str(self.project / "run.sh"), *arguments]
        done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=600)
        assert done.returncode == code, done.stderr
        return done

    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines()

    def launched(self) -> argparse.Namespace:
        """The options of the last call, as the launcher parses them."""
        option, module, *words = Path(f"{self._calls}.last").read_text().split("\0")[:-1]
        assert (option, module) == ("-m", "gaccum_ms.launch")
        return parse(words)


@pytest.fixture
def recorder(tmp_path) -> Recorder:
    return Recorder(tmp_path)


SHARED = "-m pytest --numprocesses auto --dist loadgroup --no-loadscope-reorder --durations 25"


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("test", f"{SHARED} -m not weekly"),
        ("test weekly -x", "-m pytest -m weekly -x"),
        ("test -k launch", "-m pytest -k launch"),
        ("test parallel -x", "-m pytest tests/semi_auto -x"),
        ("test device -k overflow", "tests/device/report.py -k overflow"),
        ("test mutations --sample 10", "tests/mutations.py --sample 10"),
        ("lint", "-m mypy"),
    ],
)
def test_words_choose_the_tests_and_their_exit_code_is_kept(recorder, words, call):
    recorder.tool("lint-imports", "#!/bin/bash\n")
    recorder.run(*words.split())
    assert recorder.calls()[-1] == call
    recorder.run(*words.split(), answer=call, code=3)


def test_another_mindspore_has_an_environment_of_its_own(recorder):
    """The active environment is left alone, although it has every module."""
    words = ["test", "--mindspore", "2.8.0", "-k", "launch"]
    recorder.run(*words)
    made, installed, pytest_ = recorder.calls()
    assert made == f"-m venv {recorder.project}/.venv-2.8.0"
    assert installed.endswith(f"--editable {recorder.project}[test] mindspore==2.8.0 in .venv")
    assert pytest_ == "-m pytest -k launch in .venv"
    recorder.run(*words)
    assert recorder.calls() == [pytest_], "it is made once"
    assert recorder.run("test", "--mindspore", code=1).stderr.endswith("--mindspore needs a version, such as 2.8.0\n")


def test_options_reach_the_launcher_and_the_rest_the_script(recorder):
    """A user's script needs no scikit-learn."""
    (script := recorder.project / "a script.py").touch()
    recorder.lacks("sklearn")
    options = ["--nodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1", "--master-port", "9000"]
    options += ["--start-timeout", "5", "--script", str(script), "--processes=2", "--epochs", "3"]
    recorder.run(*options)
    assert recorder.calls() == [f"-m gaccum_ms.launch --default-script {recorder.sample} {' '.join(options)}"]
    parsed = recorder.launched()
    assert (parsed.processes, parsed.script, parsed.args) == (2, str(script), ["--epochs", "3"])


def test_a_mistake_and_help_are_shown_and_nothing_is_installed(recorder):
    recorder.lacks("mindspore", "sklearn")
    done = recorder.run("--proceses", "2", code=2)
    assert done.stderr.startswith("error: there is no option --proceses; is --processes meant?")
    assert done.stderr.count("\n") == 1
    assert recorder.run("--help").stdout.startswith("bash run.sh [options]")
    assert "--start-timeout" in recorder.run("--processes", "2", "--help").stdout
    assert recorder.calls() == []


def test_the_samples_own_options_begin_its_words(recorder):
    """They need no `--` before them."""
    options = re.findall(r'add_argument\(\s*"(--[a-z-]+)"', recorder.sample.read_text())
    assert len(options) > 5
    for option in options:
        assert parse(["--default-script", str(recorder.sample), option, "3"]).args == [option, "3"]


def test_a_sample_gets_what_it_needs_and_its_words(recorder):
    recorder.run("sample", "contrastive", "--epochs", "3")
    assert recorder.calls() == [f"{recorder.project}/sample_code/contrastive/train.py --epochs 3"]
    recorder.lacks("mindcv")
    recorder.run("sample", "contrastive")
    assert recorder.calls()[1].endswith(f"--editable {recorder.project}[gallery] in .venv")
    script = recorder.project / "sample_code" / "language_model" / "train.py"
    recorder.run("--processes", "2", "--script", str(script))
    assert recorder.launched().script == str(script)
    assert len(recorder.calls()) == 1, "a launched one needs the same"


def test_an_active_environment_is_left_as_it_is(recorder):
    """The missing packages are installed into .venv, once. Standard output is the launcher's alone, so that a dry run's
    script can be piped."""
    recorder.lacks("tqdm", "sklearn")
    words = ["--dry-run", "slurm"]
    done = recorder.run(*words)
    assert done.stdout == ""
    assert f"installing gaccum_ms[sample] into {recorder.project}/.venv, for want of tqdm, sklearn\n" in done.stderr
    made, installed, *launched = recorder.calls()
    assert made == f"-m venv {recorder.project}/.venv"
    assert installed.endswith(f"--editable {recorder.project}[sample] in .venv")
    assert launched[-1].endswith(" in .venv")
    recorder.run(*words)
    assert recorder.calls() == launched, "and then nothing is made or installed"


def test_ci_fails_if_a_command_fails_and_goes_on_without_ray(tmp_path):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    for name in ("bash", "dirname", "id"):  # no apt-get: nothing is installed
        (tmp_path / name).symlink_to(shutil.which(name))

    def run(failing: str) -> tuple[int, list[str]]:
        (tmp_path / "run.sh").write_text(f'echo "${{EXTRAS:+with $EXTRAS: }}$*"\n[[ "$*" != "{failing}"* ]]\n')
        command, env = ["bash", str(tmp_path / ".ci" / "run")], {"PATH": str(tmp_path)}
        done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=600)
        return done.returncode, done.stdout.splitlines()

    code, said = run("nothing")
    assert code == 0
    assert {"lint", "with ray: test --version", "with ray: test", "test mutations --sample 10 --minutes 70"} <= set(
        said
    )
    files = [file for line in said for file in re.findall(r"tests/\S+", line)]
    assert files and all((ROOT / file).exists() for file in files)
    for line in said:
        command = " ".join(line.removeprefix("with ray: ").split()[:2])
        code, without_it = run(command)
        assert code == (command != "test --version"), command  # which says whether there is Ray
        assert code or "test" in without_it
