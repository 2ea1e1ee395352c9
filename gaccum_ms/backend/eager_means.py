"""The mean of ``ops.BCEWithLogitsLoss`` in PyNative mode, with the right gradient for micro-batches of all sizes.

MindSpore (2.7.2 to 2.10) divides an eager gradient of this mean by the number of elements that the process's first one
had. A smaller micro-batch then counts too little: a ragged last one, or any after the whole batch. `nn`, `ops` and
`mint` all call this operator. The gradients of its elements are right, and so are compiled graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mindspore import ops

_Operator = ops.BCEWithLogitsLoss
_MEAN, _ELEMENTS = _Operator("mean"), _Operator("none")


@contextmanager
def mean_of_elements() -> Iterator[None]:
    """Within it, the operator's mean is the mean of its elements, taken by another operator."""
    original = _Operator.__call__

    def call(operator: Any, *inputs: Any, **named: Any) -> Any:
        if operator.reduction != _MEAN.reduction:
            return original(operator, *inputs, **named)
        return original(_ELEMENTS, *inputs, **named).mean()

    _Operator.__call__ = call
    try:
        yield
    finally:
        _Operator.__call__ = original
