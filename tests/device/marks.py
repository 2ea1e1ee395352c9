"""The tests for devices, found by their marks: ``python tests/device/marks.py`` writes the table of their page.

``bash run.sh test device`` runs the tests with ``@pytest.mark.device("what it shows")``. When one has passed on a
device, add ``ran="an H100, a date"`` to its mark, and write the page again.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "hardware.md"
TABLE = "| what is shown | test | ran on |\n| --- | --- | --- |\n"  # the head of the page's table


class Marked(NamedTuple):
    """A test for a device."""

    what: str
    file: str
    name: str
    ran: str


def marked() -> list[Marked]:
    """All tests for devices, in the order of their files."""
    found = []
    for file in sorted((ROOT / "tests").glob("*/test_*.py")):
        for node in ast.parse(file.read_text()).body:
            for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.device":
                    ran = {one.arg: ast.literal_eval(one.value) for one in mark.keywords}.get("ran", "never")
                    what = ast.literal_eval(mark.args[0])
                    found.append(Marked(what, str(file.relative_to(ROOT)), node.name, ran))
    return found


def page() -> str:
    """The page, with the table as it must be."""
    rows = "".join(f"| {one.what} | `{one.file}::{one.name}` | {one.ran} |\n" for one in marked())
    before, after = PAGE.read_text().split(TABLE)
    return before + TABLE + rows + after[after.index("\n\n") + 1 :]


if __name__ == "__main__":
    PAGE.write_text(page())
