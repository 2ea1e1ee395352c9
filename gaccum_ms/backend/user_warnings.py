"""Warnings that show the user's own line, however many of our and MindSpore's functions are between."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import mindspore as ms

_NOT_THE_USERS = (str(Path(__file__).parents[1]) + os.sep, str(Path(ms.__file__).parent) + os.sep)


def warn_user(text: str) -> None:
    """Warn at the innermost line that is neither ours nor MindSpore's."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level)
