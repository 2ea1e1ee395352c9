"""Ascend's saturation mode: an overflow becomes the largest finite number, and only a flag of the device shows it.

The 910A always has this mode; the 910B has it under ``MS_ASCEND_CHECK_OVERFLOW_MODE=SATURATION_MODE`` . No gradient
looks infinite there, not even after the sum over ranks. Where overflows matter, the step therefore does as MindSpore's
`nn.TrainOneStepWithLossScaleCell` :

    clear the flag          before a batch's forward; in a loop of your own, at the end of the previous call
    read the flag           after each batch of an open window, and at a window's end; it stays set until it is cleared
    sum it over ranks       an overflow on one rank drops the window on all

`amp.all_finite` , which checks single micro-batches, reads and clears the same flag. In every other mode, and on other
devices, graphs contain none of these kernels.
"""

from __future__ import annotations

import os

import mindspore as ms
from mindspore import ops

from gaccum_ms import backend

_VARIABLE = "MS_ASCEND_CHECK_OVERFLOW_MODE"
_FLAG = (8,)  # int32; the input only fixes the order

_clear = backend.NPUClearFloatStatusV2()
_get = backend.NPUGetFloatStatusV2()


@ops.constexpr
def saturates():
    """Whether this device saturates in this mode; MindSpore's own steps use the same condition."""
    if not backend.ascend_target():
        return False
    return backend.ascend_910a_target() or (backend.ascend_910b_target() and os.getenv(_VARIABLE) == "SATURATION_MODE")


# -- compiled ----------------------------------------------------------------------------------------------------------


def clear_flag(after):
    """Clear the flag once `after` is computed. Returns `after` ; its users run after the clearing."""
    if saturates():
        after = ops.depend(after, _clear(ops.depend(ops.zeros(_FLAG, ms.int32), after)))
    return after


def read_flag(after):
    """1 if anything overflowed between the clearing and `after` , else 0; float32 of shape (1,)."""
    flag = _get(ops.depend(ops.zeros(_FLAG, ms.int32), after))
    return ops.cast((flag != 0).any(0, keep_dims=True), ms.float32)
