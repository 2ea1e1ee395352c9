"""All names of `gaccum_ms` in a separate process, with the hook, for any command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import gaccum_ms
from gaccum_ms import GradAccumulationCell
from mindspore.amp import build_train_network
from mindspore.train import Model

assert build_train_network.__code__.co_filename.endswith("hooked_functions.py"), "the hook comes with the cell"
assert Model._train.__code__.co_filename.endswith("hooked_functions.py")

import pickle
import gaccum_ms.auditing.audit
from gaccum_ms import *

assert set(gaccum_ms.__all__) <= set(dir(gaccum_ms)) & set(globals())
assert callable(gaccum_ms.audit) and gaccum_ms.audit is audit
assert pickle.loads(pickle.dumps(GradAccumulationCell)) is GradAccumulationCell
print("all there")
"""


def test_a_plain_import_gives_all_names_and_the_hook_with_the_cell(tmp_path):
    """The words of the command line change nothing, also those of the launcher."""
    (tmp_path / "script.py").write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "script", "-m", "gaccum_ms.launch"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout == "all there\n", done.stderr
