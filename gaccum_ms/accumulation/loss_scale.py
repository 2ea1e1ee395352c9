"""Loss scaling: the scale as a Parameter, and whether a window may update.

The scale multiplies the seed of each micro-batch's backward and is divided out once, after the reduction. The reduced
gradient is checked for overflow: a NaN or infinity of one rank is then on all ranks, so they agree without further
communication.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import nn

from gaccum_ms.backend.parameters import own


def check_scale(owner: str, value: ms.Tensor) -> None:
    """Raise a ValueError for a scale, of shape () or (1,), that is not positive and finite."""
    if not 0 < float(value.asnumpy().reshape(())) < float("inf"):
        raise ValueError(f"For '{owner}', the argument 'scale_sense' must be positive and finite, but got {value}.")


def scale_parameter(owner: str, scale_sense: nn.Cell | ms.Tensor) -> tuple[ms.Parameter, nn.Cell | None]:
    """The scale as a Parameter, and the manager Cell that adjusts it, as `nn.TrainOneStepWithLossScaleCell` takes
    them."""
    manager = scale_sense if isinstance(scale_sense, nn.Cell) else None
    if manager is not None:
        value = ms.Tensor(manager.get_loss_scale(), ms.float32)
    elif isinstance(scale_sense, ms.Tensor):
        value = scale_sense.astype(ms.float32)
    else:
        raise TypeError(
            f"For '{owner}', the argument 'scale_sense' must be a Cell or a Tensor, but got {scale_sense!r} of type "
            f"'{type(scale_sense).__name__}'. Give mindspore.Tensor(1024.0, mindspore.float32) for a fixed scale; for "
            f"one that is adjusted nn.DynamicLossScaleUpdateCell(...), or a LossScaleManager's get_update_cell()."
        )
    if value.shape not in ((), (1,)):
        raise ValueError(f"For '{owner}', the shape of 'scale_sense' must be () or (1,), but got {value.shape}.")
    check_scale(owner, value)
    return ms.Parameter(value, name=own("scale_sense"), requires_grad=False), manager
