"""The package alone imports and changes nothing. Each of its modules can be imported first; what defines or uses the
cell puts the hook into MindSpore. Type checkers, `help` and `dir` know the names."""

from __future__ import annotations

import ast
import json
import os
import pydoc
import re
import subprocess
import sys

import pytest

import gaccum_ms
from tests.structure import PACKAGE

ROOT = PACKAGE.parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__main__.py")
MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in FILES]

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
            told = [None, hooked, "gaccum_ms.cell" in sys.modules or "gaccum_ms.record.window_callback" in sys.modules]
        except BaseException:
            told = [traceback.format_exc(), False, False]
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


@pytest.mark.core("main")
@pytest.mark.parametrize("which", ["main", "all"])
def test_each_module_can_be_the_first_and_the_hook_is_there_with_the_cell(which, tmp_path):
    """Only what other packages' adapters import must be left out, where these packages are missing."""
    main = ["gaccum_ms.cell", "gaccum_ms.training.step", "gaccum_ms.model_hook", "gaccum_ms.adopt.mindcv"]
    names = main if which == "main" else [*MODULES]
    code = f"import sys; sys.dont_write_bytecode, sys.pycache_prefix = False, {str(tmp_path)!r}\n{EACH}"
    answers = [json.loads(line) for line in run("-c", code, input=json.dumps(names)).splitlines()]
    assert [name for name, *_ in answers] == names
    assert {name: error for name, error, _, _ in answers if error} == {}
    assert [name for name, _, hooked, has_cell in answers if hooked != has_cell] == []
    assert {name: hooked for name, _, hooked, _ in answers if name in main} == dict.fromkeys(main, True)


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


PROGRAM = """
import gaccum_ms
from gaccum_ms import GradAccumulationCell, GradAccumulator
from gaccum_ms import *

reveal_type(GradAccumulationCell)
reveal_type(GradAccumulator.flush)
reveal_type(scale_learning_rate)
gaccum_ms.Missing
"""


@pytest.mark.thorough
def test_a_type_checker_sees_the_names(tmp_path):
    pytest.importorskip("mypy", reason="mypy is in the extra 'test'")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    env = {**os.environ, "MYPYPATH": str(ROOT)}
    words = ["--ignore-missing-imports", "--cache-dir", str(tmp_path / "cache"), "--config-file", os.devnull]
    command = [sys.executable, "-m", "mypy", *words, "--follow-imports=silent", str(program)]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 1, done.stderr
    said = re.findall(r"(?:Revealed type is|error:) (.*)", done.stdout)
    assert len(said) == 4, done.stdout
    assert "gaccum_ms.cell.GradAccumulationCell" in said[0]
    assert "-> bool" in said[1] and "def (" in said[2]
    assert 'Module has no attribute "Missing"' in said[3]
