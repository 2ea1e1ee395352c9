"""Where the tests' files are."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent


def python_path() -> str:
    """The ``PYTHONPATH`` with which another process can import the tests and the project."""
    return os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


def worker(name: str) -> Path:
    """The path of a program in ``tests/`` ."""
    (path,) = TESTS.glob(f"*/{name}")
    return path
