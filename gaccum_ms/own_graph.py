"""A part of training that runs by itself, beside the training step's graph: in graph mode as a graph of its own."""

from __future__ import annotations

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
        if self._jit and ms.get_context("mode") == ms.PYNATIVE_MODE:
            # PyNative's tape, left open by any eager gradient before, would record this to differentiate it.
            with ms.common._no_grad():
                return self._compiled_construct(*inputs)
        return self(*inputs)

    @ms.jit
    def _compiled_construct(self, *inputs):
        return self.construct(*inputs)


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
