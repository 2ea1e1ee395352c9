"""MindSpore's private names: each exists, each that the package uses is looked up in backend/, and missing ones are
named when the package is imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gaccum_ms
from gaccum_ms import backend

PACKAGE = Path(gaccum_ms.__file__).parent
TREES = {file: ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py") if file.parent.name != "launch"}
LOOKED_UP = (PACKAGE / "backend" / "__init__.py").read_text()


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def own_names(tree: ast.AST) -> Iterator[str]:
    """The names that a module of the package defines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def test_nothing_is_missing_and_the_supported_versions_are_those_of_setup():
    assert backend.missing == []
    assert f'"mindspore{backend.SUPPORTED}"' in (PACKAGE.parent / "setup.py").read_text()


def test_no_other_module_imports_a_private_name():
    imported = {
        f"{file.name}: {node.module} {one.name}"
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mindspore")
        for one in node.names
        if any(map(is_private, [*node.module.split("."), one.name]))
    }
    assert imported == set()


def test_each_private_attribute_is_looked_up():
    own = {name for tree in TREES.values() for name in own_names(tree)} - {"_user_parameters"}  # MindSpore's own
    pythons = {"_asdict", "_replace", "_fields", "_exit", "_getframe"}
    used = {
        node.attr
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own | pythons
    }
    assert {"_train", "_cells", "_config"} <= used | own, "this test would see no attribute"
    assert [name for name in sorted(used) if f'"{name}' not in LOOKED_UP] == []


def test_what_is_missing_is_named_at_import():
    lacks = "del mindspore.nn.Cell.compile_and_run, mindspore.common._no_grad"
    program = f"import mindspore, mindspore.common, mindspore.nn\n{lacks}\nimport gaccum_ms.cell"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith(f"ImportError: For 'gaccum_ms', MindSpore must be {backend.SUPPORTED}, but got MindSpore ")
    names = last.partition("which lacks ")[2].partition(". ")[0]
    assert "Cell.compile_and_run" in names and "mindspore.common._no_grad" in names
