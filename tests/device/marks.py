"""The tests for devices, found by their marks: ``python tests/device/marks.py`` writes the table of their page.

``bash run.sh test device`` runs the tests with ``@pytest.mark.device("what it shows")``. When one has passed on a
device, add ``ran="an H100, a date"`` to its mark, and write the page again.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "hardware.md"
TABLE = "| what is shown | test | ran on |\n| --- | --- | --- |\n"  # the head of the page's table


def rows() -> Iterator[str]:
    """A row for each test, in the order of their files."""
    for file in sorted((ROOT / "tests").glob("*/test_*.py")):
        for node in ast.parse(file.read_text()).body:
            for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.device":
                    ran = {one.arg: ast.literal_eval(one.value) for one in mark.keywords}.get("ran", "never")
                    what = ast.literal_eval(mark.args[0])
                    yield f"| {what} | `{file.relative_to(ROOT)}::{node.name}` | {ran} |\n"


def page() -> str:
    """The page, with the table as it must be."""
    before, after = PAGE.read_text().split(TABLE)
    return before + TABLE + "".join(rows()) + after[after.index("\n\n") + 1 :]


if __name__ == "__main__":
    PAGE.write_text(page())
