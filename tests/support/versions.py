"""The MindSpore version of the tests."""

from __future__ import annotations

import re

import mindspore as ms


def before(*version: int) -> bool:
    """Whether MindSpore is older than this version."""
    return tuple(map(int, re.findall(r"\d+", ms.__version__)[:3])) < version
