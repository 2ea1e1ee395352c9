"""The wheel that users install trains on ranks, without the checkout."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import gaccum_ms
from tests.end_to_end.test_docs import HOWTO, code_blocks

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
pytestmark = pytest.mark.distributed

# This is added to a script: it prints the package's files that the script has imported.
WHERE_FROM = """
import sys
files = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "gaccum_ms"]
print("files", *files, sep="\\n")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built in a copy of the project, because setuptools leaves files there."""
    for name in ("pip", "setuptools", "wheel"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"'{name}' is in the extra 'test'")
    folder = tmp_path_factory.mktemp("wheel")
    project = folder / "project"
    shutil.copytree(ROOT / "gaccum_ms", project / "gaccum_ms", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    pip("wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", folder, project)
    return next(folder.glob("*.whl"))


def pip(*words: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, words)]
    done = subprocess.run(command, env=VARIABLES, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_has_every_file_of_the_package(wheel):
    folder = ROOT / "gaccum_ms"
    files = {str(path.relative_to(ROOT)) for path in folder.rglob("*") if path.suffix in (".py", ".typed", ".html")}
    with zipfile.ZipFile(wheel) as opened:
        packed = set(opened.namelist())
    assert {name for name in packed if name.startswith("gaccum_ms/")} == files
    assert {name.partition("/")[0] for name in packed} == {"gaccum_ms", f"{wheel.name.split('-py3')[0]}.dist-info"}


def test_the_command_starts_ranks_and_draws_what_they_have_recorded(wheel, tmp_path):
    """The checkout is not used. The script is the program of the page on several devices: two ranks print the page's
    loss, which is that of any number of ranks, and have the same weights."""
    installed, script = tmp_path / "installed", tmp_path / "train.py"
    pip("install", "--no-deps", "--no-index", "--target", installed, wheel)

    def run(*words: str) -> str:
        """The output of the wheel's `gaccum-ms` ."""
        env, command = {**VARIABLES, "PYTHONPATH": str(installed)}, [installed / "bin" / "gaccum-ms", *words]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    script.write_text(code_blocks(HOWTO / "devices.md", "python")[0] + WHERE_FROM + "print(net[0].weight.asnumpy())")
    said = run("run", "--processes", "2", "--timeout", "500", "train.py")
    assert said.startswith("20 updates, loss on all samples 1.02"), said
    assert "2 ranks finished in" in said
    assert str(ROOT) not in said
    of_ranks = [(tmp_path / "log_output" / "1" / f"rank.{rank}" / "stdout").read_text() for rank in range(2)]
    files, weights = zip(*(one.partition("files\n")[2].split("[[") for one in of_ranks), strict=True)
    assert weights[0] == weights[1]
    for one in files:
        ours = [line for line in one.splitlines() if "/gaccum_ms/" in line]
        assert len(ours) > 20
        assert all(line.startswith(f"{installed}/gaccum_ms/") for line in ours), one
    said = run("report", "windows.jsonl", "--output", "report.html")
    assert said == "20 windows: report.html\n"
    assert (tmp_path / "report.html").read_text().count("<svg") >= 5
    assert run("--version") == f"gaccum-ms {gaccum_ms.__version__}\n"
