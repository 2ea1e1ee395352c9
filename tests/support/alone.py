"""Runs a function of a test in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

SECONDS = 600


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of a module returns in a new process, where nothing has been compiled yet."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result(timeout=SECONDS)
