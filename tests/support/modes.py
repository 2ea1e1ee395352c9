"""The two ways in which MindSpore runs a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mindspore as ms

MODES = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}


@contextmanager
def eagerly() -> Iterator[None]:
    """PyNative mode, which compiles nothing, for a reference; then the mode from before. Also a decorator."""
    mode = ms.get_context("mode")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    try:
        yield
    finally:
        ms.set_context(mode=mode)
