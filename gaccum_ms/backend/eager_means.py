"""The mean of ``ops.BCEWithLogitsLoss`` in PyNative mode, with the right gradient for micro-batches of all sizes.

MindSpore (2.7.2 to 2.10) divides an eager gradient of this mean by the number of elements that the process's first one
had. A smaller micro-batch then counts too little: a ragged last one, or any after the whole batch. `nn`, `ops` and
`mint` all call this operator. The gradients of its elements are right, and so are compiled graphs.

The call is replaced in the operator's class, because Python looks a call up there, and MindSpore's functions make
operators of their own. Other threads do not see it, and it is put back at the end.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mindspore import ops

_Operator = ops.BCEWithLogitsLoss
_MEAN, _ELEMENTS = _Operator("mean"), _Operator("none")
_original = _Operator.__call__
_lock = threading.Lock()
_threads: Counter[int] = Counter()  # that are within it, and how often


@contextmanager
def mean_of_elements() -> Iterator[None]:
    """Within it, the operator's mean is the mean of its elements, taken by another operator, in this thread."""
    thread = threading.get_ident()
    with _lock:
        _threads[thread] += 1
        _Operator.__call__ = _call
    try:
        yield
    finally:
        with _lock:
            _threads[thread] -= 1
            if not _threads[thread]:
                del _threads[thread]
            if not _threads:
                _Operator.__call__ = _original


def _call(operator: Any, *inputs: Any, **named: Any) -> Any:
    if operator.reduction != _MEAN.reduction or threading.get_ident() not in _threads:
        return _original(operator, *inputs, **named)
    return _original(_ELEMENTS, *inputs, **named).mean()
