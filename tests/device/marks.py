"""The tests for devices, found by their marks: ``python tests/device/marks.py`` writes their page.

``bash run.sh test device`` runs the tests with ``@pytest.mark.device("what it shows")``. When one has passed on a
device, add ``ran="GPU, a date"`` to its mark, and write the page again.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "hardware.md"
HEAD = """# What has never run on hardware

No Ascend or GPU was there when this package was written. Each row is a test that passes on CPU, and that waits for a
device; the second table says what is not shown before it has run there.

On the day when a device is there, one command runs them all, and the benchmarks, on as many ranks as there are
devices, eight at most:

```bash
bash run.sh test device
```

It says what the machine has, and writes `build/device/report.md`: the machine, each test with its result and seconds,
why one failed, and the benchmarks' table. Its exit code is the tests' exit code, or 3 without a device. With
`DEVICE=CPU` before it, the same tests run on CPU, on two ranks. Words after `device` go to pytest: `-k overflow`.

| what is shown | test | ran on |
| --- | --- | --- |
"""
LEFT_OPEN = {
    "speed and memory": "the benchmarks' targets are for two cores of a CPU; on a device they are only measured",
    "semi-auto parallel mode on large networks": "the compiler's passes are tested by eight devices' finished graphs: "
    "[How it was proved](parallel.md#how-it-was-proved)",
    "several hosts": "were network namespaces of one machine: [Several hosts](launching.md#several-hosts)",
    "a broken device that is left out": "`CUDA_VISIBLE_DEVICES` and `ASCEND_RT_VISIBLE_DEVICES` are set, and nothing "
    "was there to read them: [Restarts](launching.md#restarts)",
    "Slurm, ssh, Ascend's tables of ranks": "stand-ins ran what `--dry-run` prints: "
    "[Under another launcher](launching.md#under-another-launcher)",
}
FOOT = """
This page is written by `python tests/device/marks.py`.
"""


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
    rows = [f"| {one.what} | `{one.name}` in `{one.file}` | {one.ran} |" for one in marked()]
    rows += ["", "| what these tests leave open | |", "| --- | --- |"]
    rows += [f"| {what} | {why} |" for what, why in LEFT_OPEN.items()]
    return HEAD + "\n".join(rows) + "\n" + FOOT


if __name__ == "__main__":
    PAGE.write_text(page())
