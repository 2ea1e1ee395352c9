"""Splitting words between the launcher and the script; errors are one line. No process is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gaccum_ms.launch import options
from tests.launch.launched import PYTHONPATH, ROOT, printed, write

SCRIPT = __file__


def parse(*words):
    return options.parse(list(words))


@pytest.mark.parametrize(
    "words",
    [f"--processes=2 {SCRIPT}", f"--processes 2 -- {SCRIPT}", f"-n2 --script={SCRIPT}", f"-n=2 --script {SCRIPT} --"],
)
def test_options_and_script_in_every_form(words):
    own = ["--epochs", "3", "--processes=5", "-n", "6", "--log-dri", "x"]
    parsed = parse("--timeout=7", *words.split(), *own)
    assert (parsed.processes, parsed.timeout, parsed.script, parsed.args) == (2, 7, SCRIPT, own)


def test_the_default_script_is_the_last_resort():
    other = options.__file__
    default = ["--default-script", other]
    assert parse(*default, "--epochs", "3").script == other
    assert parse(*default, "--epochs", "3").args == ["--epochs", "3"]
    assert parse(*default, SCRIPT, "--epochs").script == SCRIPT
    assert parse(*default, "--script", SCRIPT, "word").args == ["word"]
    assert parse(*default, "--", "--log-dri", "x").args == ["--log-dri", "x"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--proceses", "2", SCRIPT], "there is no option --proceses; is --processes meant?"),
        (["--timeout"], "argument --timeout: expected one argument"),
        ([], "the script is missing"),
        (["missing.py"], "no such script: missing.py"),
        (["--timeout=inf", SCRIPT], "--timeout must be a finite number of seconds, at least 0, but got"),
        (["--processes", "0", SCRIPT], "--processes must be at least 1, but got 0"),
        (["--nodes", "2", SCRIPT], "--nodes needs --master-addr"),
        (["--nodes", "2", "--launcher", "mpirun", SCRIPT], "--nodes needs --launcher msrun"),
        (["--rank_table_file", "missing.json", SCRIPT], "--rank-table-file: no such file: missing.json"),
        (["--ray-address=a", SCRIPT], "--ray-address needs --on ray"),
        (["--on=ray", "--ray-resources=CPU", SCRIPT], "argument --ray-resources: invalid resources value: 'CPU'"),
        (["--nodes=2", "--master-addr=a", "--max-restarts=1", SCRIPT], "--max-restarts and --min-processes need one"),
        (["--dry-run=openmpi", SCRIPT], "--dry-run openmpi needs --hosts"),
        (["--hosts=a,b", "--nodes=3", "--dry-run=openmpi", SCRIPT], "--hosts must be --nodes = 3 names, but got 2"),
    ],
)
def test_a_mistake_is_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as error:
        parse(*words)
    said = capsys.readouterr().err
    assert error.value.code == 2
    assert said.startswith(f"error: {message}")
    assert said.count("\n") == 1


def test_help_run_sh_and_docs_have_one_list_of_options():
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, "COLUMNS": "80"}

    def shown(*command) -> str:
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=True).stdout

    launcher = shown(sys.executable, "-m", "gaccum_ms", "run", "--help")
    options = launcher[launcher.index("the ranks:") :]
    assert "--max-restarts N" in options
    assert "--default-script" not in options
    assert options in shown("bash", str(ROOT / "run.sh"), "--help")
    assert options in Path(ROOT / "docs" / "launching.md").read_text()


def test_the_options_of_ray():
    options = ["--on=ray", "--nodes=2", "--max-restarts=1", "--min-processes=8", "--ray-resources=CPU=2,NPU=1"]
    parsed = parse(*options, SCRIPT)
    assert (parsed.on, parsed.nodes, parsed.master_port) == ("ray", 2, 0)
    assert parsed.ray_resources == {"CPU": 2, "NPU": 1}
    folder = os.path.dirname(SCRIPT)
    assert parse("--on=ray", f"--ray-working-dir={folder}", SCRIPT).script == os.path.basename(SCRIPT)


def test_a_script_is_printed_with_the_launchers_options_and_nothing_is_started(tmp_path):
    script = write(tmp_path / "script.py", "")
    for form in ("slurm", "openmpi"):
        text = printed(script, "--launcher=mpirun", "--timeout=7", "--hosts=a", f"--dry-run={form}")
        assert text.startswith("#!/bin/bash\n")
        assert "--launcher=mpirun --timeout=7.0 --nodes 1" in text
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_a_script_that_cannot_be_printed_is_no_success():
    command = [sys.executable, "-m", "gaccum_ms.launch", "--dry-run", "slurm", SCRIPT]
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, env=env, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (1, "note: standard output takes no more: No space left on device\n")
