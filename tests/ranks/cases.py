"""What the cases of several workers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mindspore as ms
import numpy as np

from tests.support.modes import MODES
from tests.support.two_ranks import Results


def set_up(mode: str = "pynative", gradients_mean: bool = True) -> None:
    """The settings of a case. Data parallel mode is set before each, in support/rank_that_stays.py."""
    ms.set_context(mode=MODES[mode])
    ms.set_auto_parallel_context(gradients_mean=gradients_mean)


def named(name: str, results: Mapping[str, Any]) -> Results:
    """The results of a case, by names that begin with its name."""
    return {f"{name}/{key}": np.asarray(value) for key, value in results.items()}


def error_of(action: Callable[[], Any]) -> str:
    """The error that an action raises on this rank, with its type; empty if there is none."""
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
