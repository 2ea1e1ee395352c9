"""Ascend's saturation mode: what overflows becomes the largest number there is, and only a flag of the device says so.

It is the 910A's mode, and others' under ``MS_ASCEND_CHECK_OVERFLOW_MODE=SATURATION_MODE`` . No gradient looks infinite
there, not after the sum over ranks either. So, where overflows are looked for, as MindSpore's
`nn.TrainOneStepWithLossScaleCell` does:

    clear the flag          before a batch goes forward; in a loop of your own, at the end of the call before
    read it                 after each batch of an open window, and at a window's end: it stays set until it is cleared
    add it up over ranks    an overflow on one drops the window on all

`amp.all_finite` , which looks at single micro-batches, reads and clears the same flag. In every other mode, and on
other devices, graphs have nothing of this.
"""

from __future__ import annotations

import os

import mindspore as ms
from mindspore import ops

from gaccum_ms import backend

_VARIABLE = "MS_ASCEND_CHECK_OVERFLOW_MODE"
_FLAG = (8,)  # int32; the input is there for the order alone

_clear = backend.NPUClearFloatStatusV2()
_get = backend.NPUGetFloatStatusV2()


@ops.constexpr
def saturates():
    """Whether this device does, in this mode. By what MindSpore's own steps decide by."""
    if not backend.ascend_target():
        return False
    return backend.ascend_910a_target() or (backend.ascend_910b_target() and os.getenv(_VARIABLE) == "SATURATION_MODE")


# -- compiled ----------------------------------------------------------------------------------------------------------


def clear_flag(after):
    """Clear the flag once `after` is there. Returns `after` : what is made of it comes later."""
    if saturates():
        after = ops.depend(after, _clear(ops.depend(ops.zeros(_FLAG, ms.int32), after)))
    return after


def read_flag(after):
    """1 if anything has overflowed from the clearing until `after` was there, else 0; float32 of shape (1,)."""
    flag = _get(ops.depend(ops.zeros(_FLAG, ms.int32), after))
    return ops.cast((flag != 0).any(), ms.float32).reshape((1,))
