"""A new option touches four files: an option is added to a copy of the project, whose tests of options pass then."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SENTENCE = "Whether the newest thing is done"
# What is written behind the option `jit` , in each file.
ADDED = {
    "gaccum_ms/options/options.py": (
        "    jit: bool | None = option(optional(check_bool))\n",
        "    newest: bool = option(check_bool, default=False)\n",
    ),
    "gaccum_ms/cell.py": (
        "        jit: bool | None = None,\n",
        "        newest: bool = False,\n",
        "A compiled step keeps each layer's `set_train` at compile time.\n",
        f"        newest (bool, optional): {SENTENCE}. Default: ``False`` .\n",
    ),
    "docs/options.md": ("as long. |\n", f"| `newest` | `False` | {SENTENCE}. |\n"),
    "tests/options/test_each_option.py": (
        '    "jit": [{"jit": True}],\n',
        '    "newest": [{"newest": True}],\n',
    ),
}


def passes(folder: Path) -> bool:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "tests/options/test_each_option.py",
    ]
    command += ["-k", "signature or defaults or docstring or new_option or page or values or refuses"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True).returncode == 0


@pytest.mark.thorough
def test_a_new_option_touches_four_files(tmp_path):
    """Signature, docstring and docs are literal text, which the tests compare with the option; its check, its key of
    found sizes and its place in each pair follow. The control: without one of the files the tests fail."""
    for name in ("gaccum_ms", "tests", "docs", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    for number, (file, texts) in enumerate(ADDED.items()):
        text = (tmp_path / file).read_text()
        for before, added in zip(texts[::2], texts[1::2], strict=True):
            assert text.count(before) == 1, (file, before)
            text = text.replace(before, before + added)
        (tmp_path / file).write_text(text)
        assert passes(tmp_path) == (number == len(ADDED) - 1), file
