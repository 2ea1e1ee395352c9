"""The forward of a network by itself: eagerly, without a gradient, and without any lasting effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import nn

from gaccum_ms.backend import no_grad
from gaccum_ms.backend.pynative_tape import close_tape
from gaccum_ms.backend.snapshot import Snapshot


def outputs_of(network: nn.Cell, inputs: Sequence[ms.Tensor], weights: Sequence[ms.Parameter]) -> tuple[Any, ...]:
    """What the network returns. Everything that it wrote is restored. `weights` : what forward does not write."""
    before = Snapshot(network, leave_out=weights)
    mode = ms.get_context("mode")
    nn.Cell.set_grad(network, False)  # else MindSpore begins to record a gradient, which an error leaves open
    ms.set_context(mode=ms.PYNATIVE_MODE)
    try:
        with no_grad():
            outputs = network(*inputs)
    except BaseException:
        close_tape()  # no gradient is open, but MindSpore has begun to count this call
        raise
    finally:
        ms.set_context(mode=mode)
        before.restore()
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def shapes_if_taken(
    network: nn.Cell, inputs: Sequence[ms.Tensor], weights: Sequence[ms.Parameter]
) -> list[tuple[int, ...] | None] | None:
    """The shapes of what the network returns; None for what is no Tensor, and of a network that does not take these
    inputs, such as one with a reshape to one number of samples."""
    try:
        outputs = outputs_of(network, inputs, weights)
    except Exception:
        return None
    return [output.shape if isinstance(output, ms.Tensor) else None for output in outputs]
