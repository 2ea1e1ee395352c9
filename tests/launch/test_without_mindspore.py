"""The launcher does not need MindSpore: it works if MindSpore is not installed, and never imports it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launched import PYTHONPATH, ROOT

pytestmark = pytest.mark.distributed
TOOLS = ("bash", "dirname", "ls", "cat")


@pytest.fixture
def bare(tmp_path) -> Path:
    """A Python that finds no package at all, in a folder with no other Python that run.sh could use."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        (folder / name).symlink_to(shutil.which(name))
    python = folder / "python3"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -s -S "$@"\n')
    python.chmod(0o755)
    return python


def run(*command: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess:
    words = [str(word) for word in command]
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, **env}
    return subprocess.run(words, env=env, cwd=cwd, capture_output=True, text=True, timeout=300)


def test_its_options_are_shown_and_read_where_nothing_is_installed(bare, tmp_path):
    launch = [bare, "-m", "gaccum_ms.launch"]
    shown = run(*launch, "--help", cwd=tmp_path)
    assert shown.stdout.startswith("usage: python -m gaccum_ms.launch [options] script [its arguments]"), shown.stderr
    assert "--default-script" not in shown.stdout
    script = run(*launch, "--processes", "2", "--print-script", __file__, "-m", "x", cwd=tmp_path)
    assert script.stdout == f"{__file__}\n", script.stderr
    refused = run(*launch, __file__, cwd=tmp_path)
    assert (refused.returncode, refused.stderr) == (2, "error: 'psutil' is not installed (pip install psutil).\n")


def test_an_old_psutil_is_refused_before_anything_is_started(bare, tmp_path):
    (tmp_path / "psutil.py").write_text("class Process:\n    def connections(self): pass\n")
    path = f"{tmp_path}{os.pathsep}{PYTHONPATH}"
    refused = run(bare, "-m", "gaccum_ms.launch", __file__, cwd=tmp_path, PYTHONPATH=path)
    assert (refused.returncode, refused.stderr) == (2, "error: 'psutil' is older than 6 (pip install 'psutil>=6').\n")
    assert not (tmp_path / "log_output").exists()


def test_the_check_names_an_old_psutil(bare, tmp_path):
    (tmp_path / "psutil-5.9.8.dist-info").mkdir()
    (tmp_path / "psutil-5.9.8.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: psutil\nVersion: 5.9.8\n"
    )
    path = f"{tmp_path}{os.pathsep}{PYTHONPATH}"
    done = run(bare, "-m", "gaccum_ms.launch.doctor", cwd=tmp_path, PYTHONPATH=path)
    assert "psutil     5.9.8\n" in done.stdout
    assert "broken: psutil. pip install 'psutil>=6'\n" in done.stderr


@pytest.mark.parametrize("words", [["check"], ["--processes=2", "--help"], ["--proceses=2", "x"]], ids=" ".join)
def test_run_sh_does_what_needs_no_package_in_a_fresh_clone(bare, tmp_path, words):
    """It works from any folder, even one whose files have the names of Python's modules."""
    clone, elsewhere = tmp_path / "a clone", tmp_path / "else where"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "gaccum_ms", clone / "gaccum_ms", ignore=ignore)
    shutil.copy(ROOT / "run.sh", clone)
    elsewhere.mkdir()
    for name in ("socket", "argparse") if hasattr(sys.flags, "safe_path") else ():  # Python 3.10 would import them
        (elsewhere / f"{name}.py").write_text("raise SystemExit('this is not Python\\'s own')")
    clean = {"PATH": str(bare.parent), "PYENV_ROOT": str(bare.parent), "PYTHONPATH": ""}
    done = run(bare.parent / "bash", clone / "run.sh", *words, cwd=elsewhere, **clean)
    if words == ["check"]:
        assert done.returncode == 1
        assert "mindspore  not installed" in done.stdout, done.stderr
        assert "CPU speed  " in done.stdout
        assert "broken: mindspore. bash run.sh lets pip install it" in done.stderr
    elif "--help" in words:
        assert (done.returncode, "--end-timeout" in done.stdout) == (0, True), done.stderr
    else:
        assert done.returncode == 2
        assert done.stderr.startswith("error: there is no option --proceses; is --processes meant?"), done.stderr


def test_where_mindspore_is_installed_it_is_not_imported(tmp_path):
    """Python's own record of imports covers a whole launch. The control: the rest of the package does import it."""
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    imports = [sys.executable, "-X", "importtime"]
    done = run(*imports, "-m", "gaccum_ms.launch", "-n", "1", "--timeout", "200", script, cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "ran"), done.stderr
    assert "gaccum_ms.launch.supervisor" in done.stderr
    assert "mindspore" not in done.stderr
    assert "mindspore" in run(*imports, "-c", "import gaccum_ms", cwd=tmp_path).stderr
