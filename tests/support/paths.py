"""The folders of the tests' modules. Workers and tests in all folders of ``tests/`` import each other only by name;
shared helpers are in the package ``support`` ."""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
_FOLDERS = [TESTS, *sorted({file.parent for file in TESTS.glob("*/*.py")} - {TESTS / "support"})]


def add_folders() -> None:
    """Make these modules importable in this process."""
    sys.path += [str(folder) for folder in _FOLDERS if str(folder) not in sys.path]


def python_path() -> str:
    """The ``PYTHONPATH`` with which another process can import them."""
    return os.pathsep.join([str(ROOT), *map(str, _FOLDERS), os.environ.get("PYTHONPATH", "")])


def worker(name: str) -> Path:
    """The path of a program in ``tests/`` ."""
    (found,) = TESTS.glob(f"*/{name}")
    return found
