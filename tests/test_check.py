"""The self-check: what it says of this machine, and of machines on which something is missing."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gaccum_ms import check, cpu_instructions, gpu

ROOT = Path(check.__file__).resolve().parents[1]


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess:
    command = ["bash", str(ROOT / "run.sh"), "check", *arguments]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, **env}
    return subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=400)


@pytest.mark.distributed
def test_this_machine_can_train_and_check_says_so():
    done = run(MS_ROLE="MS_SCHED", RANK_ID="7")
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines["mindspore"] == importlib.metadata.version("mindspore")
    assert lines["numpy"] == importlib.metadata.version("numpy")
    assert lines["Python"].startswith(sys.version.split()[0])
    assert lines["msrun"].endswith("bin/msrun")
    assert lines["CPU"] == "works"
    assert lines["oneDNN"] == cpu_instructions.description()
    if not gpu.has_driver():
        assert lines["GPU"] == f"no: there is no NVIDIA driver ({gpu.DRIVER})"
    assert lines["AllReduce"] == "works on 2 processes"


def test_a_machine_without_mindspore_gets_the_remedy(tmp_path):
    """Its Python finds no package at all."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    python.chmod(0o755)
    command = [str(python), str(Path(check.__file__))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert "mindspore  not installed" in done.stdout
    assert "broken: mindspore. bash run.sh lets pip install it" in done.stderr
    assert "AllReduce" not in done.stdout, "nothing is tried that cannot work"


def test_wrong_versions_are_named():
    finding = check.check_package("numpy", lambda version: version[0] == "0", "numpy<1")
    assert finding == ("numpy", importlib.metadata.version("numpy"), "pip install 'numpy<1'")
    assert check.check_package("numpy", lambda version: version[0] == "1", "numpy<2").remedy == ""


def test_a_driver_without_the_libraries_is_broken(monkeypatch):
    monkeypatch.setattr(gpu, "has_driver", lambda: True)
    monkeypatch.setattr(gpu, "missing_packages", lambda: ["nvidia-cudnn-cu11"])
    finding = check.check_device("GPU", {**os.environ, "CUDA_HOME": ""})
    assert finding == ("GPU", "no: nvidia-cudnn-cu11 missing", gpu.REMEDY)


def test_a_device_that_fails_gives_its_reason(tmp_path):
    (tmp_path / "mindspore.py").write_text("raise ImportError('this MindSpore is broken')")
    finding = check.check_device("CPU", {**os.environ, "PYTHONPATH": str(tmp_path)})
    assert finding.text == "fails: ImportError: this MindSpore is broken"
    assert finding.remedy


@pytest.mark.distributed
def test_ranks_that_cannot_talk_are_broken(tmp_path, monkeypatch):
    (tmp_path / "mindspore.py").write_text("raise ImportError('this MindSpore is broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = check.check_ranks()
    assert finding.text.startswith("fails on 2 processes:\nerror: ")
    assert "this MindSpore is broken" in finding.text
    assert finding.remedy
