"""Where the tests' modules lie. Workers and tests import each other by name alone, whichever folder of ``tests/`` they
are in; what several of them need is in the package ``support`` ."""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
_FOLDERS = [TESTS, *sorted({file.parent for file in TESTS.glob("*/*.py")} - {TESTS / "support"})]


def add_folders() -> None:
    """Let this process import them."""
    sys.path += [str(folder) for folder in _FOLDERS if str(folder) not in sys.path]


def python_path() -> str:
    """The variable ``PYTHONPATH`` with which another process can."""
    return os.pathsep.join([str(ROOT), *map(str, _FOLDERS), os.environ.get("PYTHONPATH", "")])


def worker(name: str) -> Path:
    """A program of ``tests/`` that a test starts."""
    (found,) = TESTS.glob(f"*/{name}")
    return found
