"""Sizes that Linux reports in /proc, in bytes."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path


def sizes_in(file: str | Path) -> Counter[str]:
    """The values in kB of a file of /proc, in bytes, by name. Of a process that has ended there are none: all are 0."""
    try:
        text = Path(file).read_text()
    except ProcessLookupError:
        text = ""
    return Counter({name: int(value) * 1024 for name, value in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)})


def own(name: str) -> int:
    """This process's value, such as ``VmRSS`` , its resident bytes, or ``VmHWM`` , their peak."""
    return sizes_in("/proc/self/status")[name]


def forget_peak() -> None:
    """Reset ``VmHWM`` ."""
    Path("/proc/self/clear_refs").write_text("5")
