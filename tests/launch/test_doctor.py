"""The self-check: its report on this machine, and on machines on which something is missing."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launched import PYTHONPATH, ROOT
from mindspore.run_check._check_version import AscendEnvChecker

from gaccum_ms.cpu import instructions
from gaccum_ms.launch import cuda, doctor


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess:
    command = ["bash", str(ROOT / "run.sh"), "check", *arguments]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, **env}
    return subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=400)


@pytest.mark.thorough
@pytest.mark.distributed
def test_this_machine_can_train_and_check_says_so():
    done = run(MS_ROLE="MS_SCHED", RANK_ID="7")
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stdout + done.stderr
    version = importlib.metadata.version("mindspore")
    assert lines["mindspore"] == f"{version}, supported (gaccum_ms needs 2.7.2 to 2.10)"
    assert lines["numpy"] == importlib.metadata.version("numpy")
    assert lines["Python"].startswith(sys.version.split()[0])
    assert lines["msrun"].endswith("bin/msrun")
    assert "CPU        works\n" in done.stdout
    assert f"CPU speed  {instructions.description()}\n" in done.stdout
    assert all(len(line) <= 80 or "/" in line for line in done.stdout.splitlines()), "only a path is longer"
    if not cuda.has_driver():
        assert lines["GPU"] == f"no: there is no NVIDIA driver ({cuda.DRIVER})"
    assert lines["AllReduce"] == "works on 2 processes"


def test_a_machine_without_mindspore_gets_the_remedy(tmp_path):
    """Its Python finds no package at all."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -s -S "$@"\n')
    python.chmod(0o755)
    command = [str(python), "-m", "gaccum_ms.launch.doctor"]
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert "mindspore  not installed" in done.stdout
    assert "broken: mindspore. bash run.sh lets pip install it" in done.stderr
    assert "AllReduce" not in done.stdout, "nothing is tried that cannot work"


def test_ctrl_c_ends_the_check_without_a_traceback(tmp_path):
    (tmp_path / "mindspore.py").write_text("import time\ntime.sleep(100)")  # the check of the CPU waits for it
    # A background job, as these tests may be, ignores Ctrl-C, and so would its children.
    program = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    )
    check = [sys.executable, "-m", "gaccum_ms.launch.doctor"]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{PYTHONPATH}"}
    with subprocess.Popen(
        [sys.executable, "-c", program, *check], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        while not process.stdout.readline().startswith(("mpirun", "psutil")):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")


def test_wrong_versions_are_named():
    finding = doctor.check_package("numpy", lambda version: version[0] == "0", "numpy<1")
    assert finding == ("numpy", importlib.metadata.version("numpy"), "pip install 'numpy<1'")
    assert doctor.check_package("numpy", lambda version: version[0] == "1", "numpy<2").remedy == ""


@pytest.mark.parametrize(
    ("version", "right"), [("2.7.1", 0), ("2.7.2", 1), ("2.8.0", 1), ("2.10.0", 1), ("2.10.0rc1", 1), ("2.11.0", 0)]
)
def test_mindspore_is_of_a_version_that_is_supported(version, right, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    finding = doctor.check_mindspore()
    assert finding.text == f"{version}, {'' if right else 'not '}supported (gaccum_ms needs 2.7.2 to 2.10)"
    assert finding.remedy == ("" if right else "pip install 'mindspore>=2.7.2,<2.11'")


CANN_FILES = ["compiler/version.info", "runtime/version.info", "opp/version.info", "version.info"]


@pytest.mark.parametrize("file", CANN_FILES)
def test_cann_is_compared_with_mindspores_own_table(tmp_path, file):
    """The installed MindSpore has such a table in its own check, which this package only reads."""
    ours = AscendEnvChecker(None).version
    (tmp_path / file).parent.mkdir(exist_ok=True)
    for version, says in (
        (f"{ours[0]}.RC1", "it goes with"),
        ("7.0.0", "it does not go with"),
        (f"{ours[-1]}.0", "it goes"),
    ):
        (tmp_path / file).write_text(f"name=x\nVersion={version}\n")
        finding = doctor.check_cann({"ASCEND_HOME_PATH": str(tmp_path)})
        assert finding.text.startswith(f"{version[:3]} in {tmp_path}; {says}")
        assert f"which needs {', '.join(ours)} (its table: mindspore/run_check/_check_version.py)" in finding.text


def test_a_cann_that_is_not_there_or_not_on_the_path_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "CANN_SCRIPTS", (str(tmp_path / "set_env.sh"),))
    assert doctor.check_cann({}).text == "not found: ASCEND_HOME_PATH is not set"
    (tmp_path / "set_env.sh").touch()
    assert doctor.check_cann({}).text.endswith(f"is not set. Run this first: source {tmp_path}/set_env.sh")
    text = doctor.check_cann({"ASCEND_HOME_PATH": str(tmp_path)}).text
    assert text == f"not found: there is no version.info in ASCEND_HOME_PATH={tmp_path}"
    (tmp_path / "version.info").write_text("Version=8.5.0\n")
    monkeypatch.setattr(cuda, "folders", lambda name: [tmp_path])
    text = doctor.check_cann({"ASCEND_HOME_PATH": str(tmp_path)}).text
    assert text == f"8.5 in {tmp_path}; the installed MindSpore has no table of CANN's versions"


def test_a_driver_without_the_libraries_is_broken(monkeypatch):
    monkeypatch.setattr(cuda, "has_driver", lambda: True)
    monkeypatch.setattr(cuda, "missing_packages", lambda: ["nvidia-cudnn-cu11"])
    finding = doctor.check_device("GPU", {**os.environ, "CUDA_HOME": ""})
    assert finding == ("GPU", "no: nvidia-cudnn-cu11 missing", cuda.REMEDY)


@pytest.mark.parametrize("driver", [True, False])
def test_a_cuda_home_of_another_version_is_named(tmp_path, monkeypatch, driver):
    """With a driver there is a remedy. Without a driver nothing would help, but the finding names it too."""
    monkeypatch.setattr(cuda, "has_driver", lambda: driver)
    monkeypatch.setattr(cuda, "missing_packages", lambda: [])
    (tmp_path / "mindspore.py").write_text("raise ImportError('this back end does not load')")
    env = {**os.environ, "CUDA_HOME": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    finding = doctor.check_device("GPU", env)
    assert f"CUDA_HOME={tmp_path} has no bin/nvcc that tells its version, and MindSpore's back end needs CUDA 11" in (
        finding.text
    )
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.131'\n")
    nvcc.chmod(0o755)
    finding = doctor.check_device("GPU", env)
    assert f"CUDA_HOME={tmp_path} is CUDA 12.4, and MindSpore's back end needs CUDA 11" in finding.text
    assert finding.remedy == ("unset CUDA_HOME, or set it to a CUDA 11" if driver else "")
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n")
    assert cuda.wrong_cuda_home({"CUDA_HOME": str(tmp_path)}) == ""


def test_a_device_that_fails_gives_its_reason(tmp_path):
    (tmp_path / "mindspore.py").write_text("raise ImportError('this MindSpore is broken')")
    finding = doctor.check_device("CPU", {**os.environ, "PYTHONPATH": str(tmp_path)})
    assert finding.text == "fails: ImportError: this MindSpore is broken"
    assert finding.remedy


@pytest.mark.distributed
def test_ranks_that_cannot_talk_are_broken(tmp_path, monkeypatch):
    (tmp_path / "mindspore.py").write_text("raise ImportError('this MindSpore is broken')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{PYTHONPATH}")
    finding = doctor.check_ranks()
    assert finding.text.startswith("fails on 2 processes:\nerror: ")
    assert "this MindSpore is broken" in finding.text
    assert finding.remedy
