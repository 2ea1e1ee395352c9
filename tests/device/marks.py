"""The tests for devices, found by their marks: ``python tests/device/marks.py`` writes their page.

``bash run.sh test device`` runs the tests with ``@pytest.mark.device("what it shows")``. When one has passed on a
device, add ``ran="an H100, a date"`` to its mark, and write the page again.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "hardware.md"
HEAD = """# Hardware and versions

**Nothing has run on Ascend, nor on several GPUs.** Some tests passed on one NVIDIA H100. On a machine with devices,
this runs all tests for them, and the benchmarks, on one rank per device, eight at most:

```bash
bash run.sh test device
```

It writes `build/device/report.md`. Its exit code is the tests', or 3 without a device. With `DEVICE=CPU` before the
command, the tests run on CPU, on two ranks. Words after `device` go to pytest, such as `-k overflow`.

## What has run on hardware

Each row of the first table is a test that passes on CPU.

| what is shown | test | ran on |
| --- | --- | --- |
"""
LEFT_OPEN = {
    "speed and memory": "On a device the benchmarks measure, and have no targets.",
    "semi-auto parallel mode on large networks": "The compiled graphs for eight devices were tested: "
    "[How it was proved](parallel.md#how-it-was-proved)",
    "checkpoints after the first step, in semi-auto parallel mode": "Whole weights are loaded before it; saving after "
    "it was simulated: [Semi-auto mode](parallel.md#semi-auto-and-auto-parallel-mode)",
    "`Model.build` and `Model.infer_train_layout`": "Both refuse CPU, with and without the cell: "
    "[Train, evaluate, predict, export](flow.md)",
    "several hosts": "The hosts were nodes of Ray and of Slurm, and network namespaces, on one machine: "
    "[Several hosts](launching.md#several-hosts)",
    "going on without a broken device": "`CUDA_VISIBLE_DEVICES` and `ASCEND_RT_VISIBLE_DEVICES` are set, but no device "
    "read them: [Restarts](launching.md#restarts)",
    "Ascend's rank tables": "Ranks without devices got them: [Several hosts](launching.md#several-hosts)",
}
BY_HAND = "By hand, on the H100"  # this paragraph and what follows


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
    """The page, in Markdown."""
    rows = [f"| {one.what} | `{one.file}::{one.name}` | {one.ran} |" for one in marked()]
    rows += ["", "| what these tests cannot show | what was tested instead |", "| --- | --- |"]
    rows += [f"| {what} | {why} |" for what, why in LEFT_OPEN.items()]
    return HEAD + "\n".join(rows) + "\n\n" + PAGE.read_text()[PAGE.read_text().index(BY_HAND) :]


if __name__ == "__main__":
    PAGE.write_text(page())
