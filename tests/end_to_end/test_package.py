"""`import gaccum_ms` in a separate process: it has all names and the hook, for any command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import gaccum_ms
from mindspore.amp import build_train_network
from mindspore.train import Model

assert build_train_network is gaccum_ms.model_hook.build_train_network, "the hook, before any name is used"
assert Model._train is gaccum_ms.model_hook._train

import pickle
import gaccum_ms.auditing.audit
from gaccum_ms import *

assert set(gaccum_ms.__all__) <= set(dir(gaccum_ms)) & set(globals())
assert callable(gaccum_ms.audit) and gaccum_ms.audit is audit
assert pickle.loads(pickle.dumps(GradAccumulationCell)) is GradAccumulationCell
print("all there")
"""


@pytest.mark.core("-m script -m gaccum_ms.launch")
@pytest.mark.parametrize(
    "words",
    [["script.py", "-m", "gaccum_ms.launch"], ["-m", "script", "-m", "gaccum_ms.launch"]],
    ids=" ".join,
)
def test_a_plain_import_gives_all_names_and_the_hook(tmp_path, words):
    """Only the launcher, ``-m gaccum_ms.launch``, imports the package without them."""
    (tmp_path / "script.py").write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout == "all there\n", done.stderr
