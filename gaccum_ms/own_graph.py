"""How a graph is run from Python: the training step's, or that of a part of training that runs by itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mindspore as ms
from mindspore import nn


class OwnGraph(nn.Cell):
    """A Cell whose `construct` Python calls, compiled in graph mode and, with `jit` , in PyNative mode too.

    Args:
        jit (bool): Whether to compile in PyNative mode.
    """

    def __init__(self, jit: bool) -> None:
        super().__init__(auto_prefix=False)
        self._jit = jit

    def run_alone(self, *inputs: Any) -> Any:
        """Call it from Python."""
        return run(self, self._jit, *inputs)


def run(cell: nn.Cell, jit: bool, *inputs: Any) -> Any:
    """Call a Cell, with `jit` compiled in PyNative mode too, unless MindSpore's ``MS_JIT=0`` forbids it: as graph mode
    does it, and not by `mindspore.jit` , which hands a graph without a loop to another thread, beside which Python's
    spins until it is through."""
    if not jit or ms.get_context("mode") != ms.PYNATIVE_MODE or os.getenv("MS_JIT") == "0":
        return nn.Cell.__call__(cell, *inputs)
    if not cell.compile_cache:  # the first call: what graph mode's does before it compiles
        cell.check_names_and_refresh_name()
        cell.__compile_cell_hook__ = True
    # PyNative's tape, left open by any eager gradient before, would record this to differentiate it.
    with ms.common._no_grad(), compiling_alone():
        return cell.compile_and_run(*inputs)


@contextmanager
def compiling_alone() -> Iterator[None]:
    """Compile on this rank alone. Where ``parameter_broadcast`` asks for it MindSpore broadcasts the weights with each
    compilation, and would wait for the other ranks."""
    asked_for = ms.get_auto_parallel_context("parameter_broadcast")
    if asked_for:
        ms.set_auto_parallel_context(parameter_broadcast=False)
    try:
        yield
    finally:
        if asked_for:
            ms.set_auto_parallel_context(parameter_broadcast=True)
