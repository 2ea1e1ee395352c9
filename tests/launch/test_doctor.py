"""The self-check: its report on this machine, and on machines on which something, as MindSpore, is missing."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gaccum_ms.launch import cuda, doctor
from tests.launch.launched import PYTHONPATH, ROOT


def run(*command: str | Path, cwd: str | Path = "/", **env: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, **env}
    return subprocess.run([*map(str, command)], env=env, cwd=cwd, capture_output=True, text=True, timeout=400)


@pytest.fixture
def broken_mindspore(tmp_path) -> str:
    """A PYTHONPATH on which MindSpore cannot be imported."""
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "mindspore.py").write_text("raise ImportError('this MindSpore is broken')")
    return f"{folder}{os.pathsep}{PYTHONPATH}"


NUMPY, _, MINDSPORE = doctor.PACKAGES


@pytest.mark.parametrize(
    ("package", "version", "right"),
    [
        *((MINDSPORE, version, 1) for version in ("2.7.2", "2.10.0rc1")),
        *((MINDSPORE, version, 0) for version in ("2.7.1", "2.11.0")),
        (NUMPY, "2.0.0", 0),
    ],
)
def test_packages_are_of_versions_that_are_supported(package, version, right, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    finding = doctor.check_package(*package)
    said = f", {'' if right else 'not '}supported (gaccum_ms needs 2.7.2 to 2.10)"
    assert finding.text == version + said * (package is MINDSPORE)
    assert finding.remedy == ("" if right else f"pip install '{package[0]}'")


def test_what_a_gpu_lacks_is_named_with_a_remedy(broken_mindspore, monkeypatch):
    monkeypatch.setattr(cuda, "has_driver", lambda: True)
    monkeypatch.setattr(cuda, "missing_packages", lambda: ["nvidia-cudnn-cu11"])
    monkeypatch.delenv("CUDA_HOME", raising=False)
    env = {**os.environ, "PYTHONPATH": broken_mindspore}
    assert doctor.check_device("GPU", env) == ("GPU", "no: nvidia-cudnn-cu11 missing", cuda.REMEDY)
    monkeypatch.setenv("CUDA_HOME", "/usr/local/cuda-12")
    assert (
        doctor.check_device("GPU", env).remedy
        == "see nvidia-smi; if CUDA_HOME=/usr/local/cuda-12 is no CUDA 11, run: unset CUDA_HOME"
    )


@pytest.mark.distributed
def test_a_device_that_fails_and_ranks_that_cannot_talk_are_broken(broken_mindspore, monkeypatch):
    finding = doctor.check_device("CPU", {**os.environ, "PYTHONPATH": broken_mindspore})
    assert finding.text == "fails: ImportError: this MindSpore is broken"
    assert finding.remedy
    monkeypatch.setenv("PYTHONPATH", broken_mindspore)
    finding = doctor.check_ranks()
    assert finding.text.startswith("fails on 2 processes:\nerror: ")
    assert "this MindSpore is broken" in finding.text
    assert finding.remedy


def test_run_sh_checks_a_fresh_clone_without_any_package(tmp_path):
    """It works from any folder, even one whose files have the names of Python's modules. There is no other Python that
    run.sh could use."""
    clone, elsewhere, tools = tmp_path / "a clone", tmp_path / "else where", tmp_path / "bin"
    elsewhere.mkdir()
    tools.mkdir()
    for name in ("bash", "dirname", "ls", "cat"):
        (tools / name).symlink_to(shutil.which(name))
    bare = tools / "python3"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -s -S "$@"\n')
    bare.chmod(0o755)
    shutil.copytree(ROOT / "gaccum_ms", clone / "gaccum_ms", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "run.sh", clone)
    for name in ("socket", "argparse") if hasattr(sys.flags, "safe_path") else ():  # Python 3.10 would import them
        (elsewhere / f"{name}.py").write_text("raise SystemExit('this is not Python\\'s own')")
    clean = {"PATH": str(tools), "PYENV_ROOT": str(tools), "PYTHONPATH": ""}
    done = run(tools / "bash", clone / "run.sh", "check", cwd=elsewhere, **clean)
    refused = run(bare, "-m", "gaccum_ms.launch", __file__, cwd=tmp_path)
    assert (refused.returncode, refused.stderr) == (2, "error: 'psutil' is not installed (pip install psutil).\n")
    assert done.returncode == 1
    assert "mindspore  not installed" in done.stdout, done.stderr
    assert "CPU speed  " in done.stdout
    assert "broken: mindspore. bash run.sh lets pip install it" in done.stderr
    assert "AllReduce" not in done.stdout, "nothing is tried that cannot work"
