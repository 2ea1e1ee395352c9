"""Operators that the compiler knows, for compiled code.

The functions of these names in `mindspore.ops` are Python, which the compiler reads anew in each compilation, and so
are loops, once for each iteration.
"""

from __future__ import annotations

from mindspore import ops

each = ops.Map()  # a function's results for all elements of a tuple, or of several of the same length, as a tuple
reshape = ops.Reshape()
stack = ops.Stack()
unstack = ops.Unstack()


def item_of(index, items):
    return items[index]
