"""Which MindSpore the tests run with."""

from __future__ import annotations

import re

import mindspore as ms


def before(*version: int) -> bool:
    """Whether it is an older one."""
    return tuple(map(int, re.findall(r"\d+", ms.__version__)[:3])) < version
