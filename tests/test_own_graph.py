"""Parts of training that run by themselves: compiled or not, and without other ranks."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops

from gaccum_ms.own_graph import OwnGraph, compiling_alone

seen: list[str] = []


@ops.constexpr
def note(what):
    """Python runs it: each time that the code around it is run eagerly, once if that is compiled."""
    seen.append(what)
    return 1


class AddOne(OwnGraph):
    def construct(self, x):
        return x + note("run")


@pytest.mark.parametrize(("jit", "runs"), [(False, 3), (True, 1)])
def test_in_pynative_mode_it_is_compiled_where_that_is_asked_for(jit, runs, pynative):
    seen.clear()
    cell = AddOne(jit)
    for _ in range(3):
        np.testing.assert_array_equal(cell.run_alone(Tensor([1.0, 2.0])).asnumpy(), [2.0, 3.0])
    assert len(seen) == runs


@pytest.mark.parametrize("asked_for", [True, False])
def test_compiles_without_a_broadcast_and_says_nothing_of_it_after(asked_for):
    ms.set_auto_parallel_context(parameter_broadcast=asked_for)
    try:
        with pytest.raises(RuntimeError, match="on the way"), compiling_alone():
            assert not ms.get_auto_parallel_context("parameter_broadcast")
            raise RuntimeError("on the way")
        assert ms.get_auto_parallel_context("parameter_broadcast") == asked_for
    finally:
        ms.reset_auto_parallel_context()
