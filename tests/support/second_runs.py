"""A test that is run once more, because MindSpore failed, runs in a process of its own.

In the same process, MindSpore's compiler failed once more on the same. ``addopts`` in ``pyproject.toml`` tells which
failures pytest-rerunfailures runs once more.
"""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if getattr(pyfuncitem, "execution_count", 1) == 1:
        return None
    mark = pyfuncitem.get_closest_marker("xdist_group")
    test = pyfuncitem.nodeid.removesuffix(f"@{mark.args[0]}" if mark else "")
    command = [sys.executable, "-m", "pytest", "--reruns", "0", test]
    process = subprocess.run(command, cwd=pyfuncitem.config.rootpath, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    return True
