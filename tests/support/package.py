"""Imports packages whose steps are compared with ours, or skips their tests with the reason."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest


def package(module: str, extra: str) -> ModuleType:
    """A package's module. If it is not installed, the tests of the file are skipped.

    Args:
        module (str): Its name.
        extra (str): How to install the package.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the package's dependencies warn
            return importlib.import_module(module)
    except ImportError as error:
        pytest.skip(f"{module} cannot be imported: {error}. {extra}", allow_module_level=True)


def modules_alone(package_name: str, *names: str) -> list[ModuleType]:
    """Modules of a package that cannot be imported as a whole: they are imported without its `__init__` . If it is not
    installed, the tests of the file are skipped."""
    try:
        found = importlib.util.find_spec(package_name)
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None:
        pytest.skip(f"{package_name} is not installed", allow_module_level=True)
    folder = Path(found.origin).parent
    for name in (package_name, f"{package_name}.utils"):
        if name not in sys.modules:
            empty = ModuleType(name)
            empty.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
            sys.modules[name] = empty
    return [importlib.import_module(name) for name in names]
