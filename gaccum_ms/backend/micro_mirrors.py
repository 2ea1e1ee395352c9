"""MindSpore's reduction of an accumulated gradient over devices, at the end of each backward in semi-auto mode.

The backward of two of its operators reduces a weight's accumulator, and one of them writes the result into the
accumulator. A batch that does not end its window must leave the accumulator as this device's own sum, or the next
backward would reduce it again. So while the graph of such a batch is compiled, that backward is replaced by one without
the reduction.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import mindspore as ms
from mindspore import ops

from gaccum_ms.backend import MicroStepAllGather, MirrorMicroStepOperator, bprop_getters

# What of MindSpore's source this replaces.
_REPLACED = {
    MirrorMicroStepOperator: "assign(z, real_grad)",
    MicroStepAllGather: "real_grad = reduce_scatter(z)",
}


def _without_reduction(self: Any) -> Any:
    """The backward's getter. `self` : the operator, which maps a weight and its accumulator to the weight."""
    cast, dtype, zeros_like, nothing = ops.Cast(), ops.DType(), ops.ZerosLike(), ms.Tensor(0.0, ms.float16)

    def bprop(x, z, out, dout):
        return ops.depend((zeros_like(x), cast(nothing, dtype(z))), dout)

    return bprop


@contextlib.contextmanager
def unreduced() -> Iterator[None]:
    """Context manager for the compilation of a graph that only adds.

    Raises:
        RuntimeError: If MindSpore's backward is not the one that this replaces.
    """
    theirs = {kind: bprop_getters[kind.__name__] for kind in _REPLACED}
    for kind, getter in theirs.items():
        if _REPLACED[kind] not in inspect.getsource(getter):
            raise RuntimeError(
                f"For 'gaccum_ms', the backward of MindSpore's operator '{kind.__name__}' must be the one that it "
                f"knows, but got another one in MindSpore {ms.__version__}. Leave 'accumulation_steps' out in "
                f"semi-auto and auto parallel mode."
            )
        bprop_getters.register(kind)(_without_reduction)
    try:
        yield
    finally:
        for kind, getter in theirs.items():
            bprop_getters.register(kind)(getter)
