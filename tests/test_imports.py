"""The package alone imports and changes nothing. A module of it can be imported first; what defines or uses the cell
puts the hook into MindSpore. Type checkers, `help` and `dir` know the names."""

from __future__ import annotations

import ast
import json
import os
import pydoc
import subprocess
import sys

import pytest

import gaccum_ms
from tests.structure import PACKAGE

ROOT = PACKAGE.parent
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
import json, os, sys, traceback
import mindspore.amp, mindspore.train
import mindspore.experimental.optim.lr_scheduler
for name in json.load(sys.stdin):
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            __import__(name)
            hooked = mindspore.train.Model._train.__code__.co_filename.endswith("hooked_functions.py")
            told = [None, hooked]
        except BaseException:
            told = [traceback.format_exc(), False]
        os.write(writer, json.dumps(told).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        print(json.dumps([name, *json.loads(answer.read())]), flush=True)
    os.waitpid(child, 0)
"""


def run(*words: str, **options) -> str:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=900, **options)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_importing_the_package_alone_has_no_effect():
    assert run("-c", ALONE) == "nothing\n"


def test_a_module_can_be_the_first_and_the_hook_is_there_with_the_cell(tmp_path):
    code = f"import sys; sys.dont_write_bytecode, sys.pycache_prefix = False, {str(tmp_path)!r}\n{EACH}"
    answers = [json.loads(line) for line in run("-c", code, input=json.dumps(HOOKED + OTHERS)).splitlines()]
    assert answers == [[name, None, name in HOOKED] for name in HOOKED + OTHERS]


def test_all_lists_of_names_agree():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    checked = next(node.body for node in tree.body if isinstance(node, ast.If))
    imported = {name.name: node.module for node in checked for name in node.names}
    assert imported.pop("adopt") == "gaccum_ms"
    assert imported == {name: f"gaccum_ms.{module}" for name, module in gaccum_ms._MODULES.items()}
    assert gaccum_ms.__all__ == sorted(imported)


def test_names_are_found_by_dir_help_and_a_star():
    assert {*gaccum_ms.__all__, "adopt", "__version__"} <= set(dir(gaccum_ms))
    text = pydoc.plain(pydoc.render_doc(gaccum_ms))
    assert [name for name in gaccum_ms.__all__ if name not in text] == []
    namespace: dict[str, object] = {}
    exec("from gaccum_ms import *", namespace)
    assert namespace.keys() >= set(gaccum_ms.__all__)
    with pytest.raises(AttributeError, match="module 'gaccum_ms' has no attribute 'Missing'"):
        _ = gaccum_ms.Missing
    with pytest.raises(ImportError, match="cannot import name 'Missing' from 'gaccum_ms'"):
        exec("from gaccum_ms import Missing")
