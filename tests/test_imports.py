"""The package alone imports and changes nothing. A module of it can be imported first; what defines or uses the cell
puts the hook into MindSpore. Type checkers, `help` and `dir` know the names."""

from __future__ import annotations

import ast
import inspect
import json
import os
import pickle
import pydoc
import subprocess
import sys

import pytest

import gaccum_ms
import gaccum_ms.auditing.audit  # whose module has the name of a function
from tests.structure import PACKAGE
from tests.support.paths import python_path

HOOKED = ["gaccum_ms.cell", "gaccum_ms.training.step", "gaccum_ms.model_hook", "gaccum_ms.adopt.mindcv"]
OTHERS = ["gaccum_ms.launch", "gaccum_ms.losses.counts"]

ALONE = """
import os, sys
before = dict(os.environ)
import gaccum_ms
assert dir(gaccum_ms) and gaccum_ms.__version__
assert not [name for name in sys.modules if name.startswith(("mindspore", "gaccum_ms."))]
assert dict(os.environ) == before
print("nothing")
"""

# Forks a copy for each module, in which it is the first of ours. MindSpore is imported before, once for all.
EACH = """
import json, os, sys
import mindspore.amp, mindspore.train
import mindspore.experimental.optim.lr_scheduler
for name in sys.argv[1:]:
    if not (child := os.fork()):
        assert not [name for name in sys.modules if name.startswith("gaccum_ms")]
        __import__(name)
        functions = mindspore.train.Model._train, mindspore.amp.build_train_network
        hooked = {function.__code__.co_filename.endswith("hooked_functions.py") for function in functions}
        print(json.dumps([name, *hooked]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_importing_the_package_alone_has_no_effect():
    env = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run([sys.executable, "-c", ALONE], env=env, capture_output=True, text=True, timeout=900)
    assert (done.stdout, done.stderr) == ("nothing\n", "")


def test_a_module_can_be_the_first_and_the_hook_is_there_with_the_cell(programs, tmp_path):
    (tmp_path / "each.py").write_text(EACH)
    done = programs.run(tmp_path / "each.py", *HOOKED, *OTHERS, folder=tmp_path)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert answers == [[name, name in HOOKED] for name in HOOKED + OTHERS], done.stderr


def test_all_lists_of_names_agree_and_nothing_else_is_public():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    checked = next(node.body for node in tree.body if isinstance(node, ast.If))
    imported = {name.name: node.module for node in checked for name in node.names}
    assert imported.pop("adopt") == "gaccum_ms"
    assert imported == {name: f"gaccum_ms.{module}" for name, module in gaccum_ms._MODULES.items()}
    assert gaccum_ms.__all__ == sorted(imported)
    namespace: dict[str, object] = {}
    exec("from gaccum_ms import *", namespace)
    assert namespace.keys() - {"__builtins__"} == set(gaccum_ms.__all__)
    public = {name for name, value in vars(gaccum_ms).items() if name[0] != "_" and not inspect.ismodule(value)}
    assert public == set(gaccum_ms.__all__)
    assert gaccum_ms.GradAccumulation is gaccum_ms.GradAccumulationCell, "a second name for MindSpore's import line"
    assert pickle.loads(pickle.dumps(gaccum_ms.GradAccumulationCell)) is gaccum_ms.GradAccumulationCell
    assert callable(gaccum_ms.audit)


def test_names_are_found_by_dir_and_help_and_missing_ones_are_named():
    assert {*gaccum_ms.__all__, "adopt", "__version__"} <= set(dir(gaccum_ms))
    text = pydoc.plain(pydoc.render_doc(gaccum_ms))
    assert [name for name in gaccum_ms.__all__ if name not in text] == []
    with pytest.raises(AttributeError, match="module 'gaccum_ms' has no attribute 'Missing'"):
        _ = gaccum_ms.Missing
    with pytest.raises(ImportError, match="cannot import name 'Missing' from 'gaccum_ms'"):
        exec("from gaccum_ms import Missing")
